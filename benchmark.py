"""Time drafters and other packages on the same prompts: `python benchmark.py output=FILE.json`.

FILE.jsonl beside the output gets a line for every prompt as soon as it is done; started again, the same
command goes on there. The JSON is made from these lines, and so is one chapter of the Markdown page `table`,
which keeps its others.
"""

import entry  # first: it sets up Hydra's environment

# isort: split
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import decode
from ablate import cut_prompts, drafter_config, drafter_maker, drafter_name, stored
from decoding.benchmark_page import grids, lines, merged, terminal_table
from decoding.contest import Contender
from decoding.generate import check_eos, check_verifier
from decoding.machine import processor
from decoding.measuring import Bench, Drafting, Store, measure
from decoding.peers import Checkpoint, build_peer, check_peer, missing, package_of
from decoding.prompt_set import Item, prompt_ids, read_items
from decoding.roofline import wall_clock
from decoding.standings import PLAIN
from mtp import Network, UserError
from mtp.errors import check_whole
from mtp.network import resolve
from train import quiet
from training.config import check_choice
from training.progress import say
from training.provenance import provenance

HELD_OUT = "held_out"
WIDE = 160  # columns of tables that go to a file
LOADING = ("model", "heads", "dtype", "device", "packed", "compile")
OF_A_DRAFTER = ("num_draft_tokens", "verifier")  # what an entry of `drafters` may say besides options
SETTINGS = (*LOADING, "max_new_tokens", "repeats", "threads")


def benchmark(config: dict[str, Any], argv: list[str]) -> None:
    """One call of benchmark.py, from the composed config."""
    check_config(config)
    torch.set_num_threads(config["threads"])
    quiet()
    check_names([named(one) for one in config["drafters"]], [named(one) for one in config["peers"]])
    drafters = {named(one): read_drafter(one, config) for one in config["drafters"]}
    peers, left_out = read_peers(config["peers"])
    files = {source: read_items(source) for source in config["prompts"] if source != HELD_OUT}
    store = Store(Path(config["output"]).with_suffix(".jsonl") if config["output"] else None)
    for name, reason in left_out.items():
        say(f"left out: {name} ({reason})")
    try:
        network = decode.load({key: config[key] for key in LOADING})
        bench = prepare(config, network, drafters, peers, read_prompts(config, network, files))
        found = measure(bench, store, say, shown)
    except KeyboardInterrupt:
        say(f"stopped; the same command goes on from {store.path}" if store.path else "stopped")
        raise SystemExit(130) from None
    others = {"packages": versions(peers), "left_out": left_out}
    finish(described(config, network, argv) | others | found, config)


def finish(document: dict[str, Any], config: dict[str, Any]) -> None:
    """Print the tables and write the files."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    for grid in grids(document):
        console.print(terminal_table(grid))
    for line in lines(document):
        console.print(line, highlight=False)
    if config["output"]:
        decode.write(config["output"], document)
    if config["table"]:
        page = Path(config["table"])
        before = page.read_text(encoding="utf-8") if page.is_file() else ""
        decode.write_text(config["table"], merged(before, document))


def described(config: dict[str, Any], network: Network, argv: list[str]) -> dict[str, Any]:
    """Where the numbers come from."""
    made = provenance({}, {}, ["benchmark.py", *argv])
    return {
        "schema": 1,
        **{key: made[key] for key in ("command", "commit", "versions")},
        "date": wall_clock(),
        "model": config["model"],
        "machine": processor(network.trunk.device),
        "threads": config["threads"],
        "form": network.form,
        "dtype": str(network.trunk.dtype).removeprefix("torch."),
        "settings": config,
    }


def read_drafter(wanted: Any, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One entry of `drafters`: the drafter's config, and how far it drafts and who verifies."""
    said = {key: config[key] for key in OF_A_DRAFTER}
    own = wanted
    if isinstance(wanted, dict):
        said |= {key: wanted[key] for key in OF_A_DRAFTER if key in wanted}
        own = {key: value for key, value in wanted.items() if key not in OF_A_DRAFTER}
    if said["num_draft_tokens"] != "auto":
        check_whole("num_draft_tokens", said["num_draft_tokens"], 0)
    check_verifier(said["verifier"])
    return drafter_config(own, "drafters"), said


def named(wanted: Any) -> str:
    """What a drafter or a peer is called in the tables; how far it drafts and who verifies stand last.

    >>> named({"drafter": "early_exit", "num_draft_tokens": "auto", "exit_layer": 3})
    'early_exit exit_layer=3 auto'
    """
    if not isinstance(wanted, dict) or not {"drafter", "peer"} & set(wanted):
        return str(wanted)  # what is no drafter is told later
    kind = "drafter" if "drafter" in wanted else "peer"
    own = {key: value for key, value in wanted.items() if key not in OF_A_DRAFTER and key != kind}
    said = [str(wanted[key]) for key in OF_A_DRAFTER if key in wanted]
    return " ".join([str(wanted[kind]), *(f"{key}={value}" for key, value in own.items()), *said])


def read_peers(wanted: list[Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Peers by label, and those whose package is not installed with the reason."""
    peers: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for one in wanted:
        said = dict(one) if isinstance(one, dict) else {"peer": one}
        name = said.pop("peer", None)
        if not isinstance(name, str):
            raise UserError(f"peers: {one!r} is neither a name nor {{peer: name, option: value}}")
        check_peer(name, said)
        if package := missing(name):
            left_out[named(one)] = f"{package} is not installed"
        else:
            peers[named(one)] = {"peer": name, **said}
    return peers, left_out


def prepare(
    config: dict[str, Any],
    network: Network,
    drafters: dict[str, tuple[dict[str, Any], dict[str, Any]]],
    peers: dict[str, dict[str, Any]],
    prompts: list[tuple[str, list[int]]],
) -> Bench:
    """All that is to be measured; a drafter that cannot be built is found here."""
    ours = [Drafting(name, drafter_maker(network, build), **said) for name, (build, said) in drafters.items()]
    for one in ours:
        one.build()
    eos = check_eos(network, None)
    checkpoint = Checkpoint(str(resolve(config["model"])), network.trunk.dtype, network.trunk.device, eos)
    made = provenance({}, {}, ["benchmark.py"])
    depends = {
        "weights": {
            name: stored(config["model"], drafter_name(build)) for name, (build, _) in drafters.items()
        },
        "trunk": stored(config["model"], "none"),
        "drafters": drafters,
        "peers": peers,
        "packages": versions(peers),
        "settings": {key: config[key] for key in SETTINGS if key != "model"},
        "machine": processor(network.trunk.device),
        "commit": made["commit"],
        "versions": made["versions"],
    }
    return Bench(
        network=network,
        drafters=ours,
        peers={name: loader(name, checkpoint, said) for name, said in peers.items()},
        prompts=prompts,
        eos_token_ids=eos,
        depends=depends,
        **{key: config[key] for key in ("max_new_tokens", "repeats", "threads", "theory", "syncs")},
    )


def versions(peers: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Of the packages that take part."""
    return {
        package: version(package) for package in sorted({package_of(one["peer"]) for one in peers.values()})
    }


def loader(name: str, checkpoint: Checkpoint, said: dict[str, Any]) -> Callable[[], Contender]:
    options = {key: value for key, value in said.items() if key != "peer"}
    return lambda: build_peer(name, said["peer"], checkpoint, options)


def read_prompts(
    config: dict[str, Any], network: Network, files: dict[str, list[Item]]
) -> list[tuple[str, list[int]]]:
    """Categories and token ids, in the order of the files; `categories` and `per_category` leave some out."""
    found: list[tuple[str, list[int]]] = []
    for source in config["prompts"]:
        if source == HELD_OUT:
            cut = cut_prompts(network, config | {"prompts": config["held_out"]})
            found += [("held-out", ids) for ids in cut]
        else:
            found += [(item.category, prompt_ids(network, item.prompt)) for item in files[source]]
    wanted, known = config["categories"], {category for category, _ in found}
    if missing := [category for category in wanted or () if category not in known]:
        raise UserError(f"categories names {missing[0]}, which is not one of {', '.join(sorted(known))}")
    found = [one for one in found if wanted is None or one[0] in wanted]
    most = config["per_category"]
    return [one for place, one in enumerate(found) if most is None or earlier(found, place) < most]


def earlier(found: list[tuple[str, list[int]]], place: int) -> int:
    """How many prompts of the same category stand before this one."""
    return sum(category == found[place][0] for category, _ in found[:place])


def shown(items: Sequence[Any]) -> Iterable[Any]:
    """The prompts, with a progress bar on a terminal and a line for each elsewhere."""
    if sys.stderr.isatty():
        yield from track(items, "decoding", console=Console(file=sys.stderr))
        return
    for place, item in enumerate(items, start=1):
        say(f"[{place}/{len(items)}]")
        yield item


def check_config(config: dict[str, Any]) -> None:
    for key in ("prompts", "drafters", "peers"):
        if not isinstance(config[key], list):
            raise UserError(f"{key}={config[key]!r} is not a list")
    if not config["prompts"] or not all(isinstance(source, str) for source in config["prompts"]):
        raise UserError(
            f"prompts={config['prompts']!r} names no files; give a list of .jsonl files or {HELD_OUT}"
        )
    for key in ("held_out", "prompt_tokens", "max_new_tokens", "repeats", "threads"):
        check_whole(key, config[key], 1)
    for key in ("seed", "theory"):
        check_whole(key, config[key], 0)
    if not (config["categories"] is None or isinstance(config["categories"], list)):
        raise UserError(f"categories={config['categories']!r} is not a list")
    if config["per_category"] is not None:
        check_whole("per_category", config["per_category"], 1)
    check_choice("dtype", config["dtype"], (None, *decode.DTYPES))
    check_choice("syncs", config["syncs"], (True, False))
    decode.check_form(config)
    for key in ("output", "table"):
        decode.check_output(key, config[key])
    if config["output"] and Path(config["output"]).suffix == ".jsonl":
        raise UserError(f"output={config['output']}: the .jsonl is for what is done; name the JSON otherwise")


def check_names(drafters: list[str], peers: list[str]) -> None:
    """No two contenders have one name."""
    names = [PLAIN, *drafters, *peers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"drafters, peers: {twice[0]} is there twice")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    entry.run(functools.partial(benchmark, argv=arguments), "benchmark", arguments)
