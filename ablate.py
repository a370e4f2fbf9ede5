"""Train networks alike, decode them alike, compare them in one table: `python ablate.py`.

`out` gets results.jsonl (a line for every row, as soon as it is done), table.md, and a folder for every
network that is trained. What is there already and was made from the same config is used, so an ablation that
was stopped goes on when it is started again.
"""

import entry  # first: it sets up Hydra's environment

# isort: split
import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import track

import decode
from decoding import Sampling, generate
from decoding.comparison import compare, counts, greedy
from decoding.contest import Build, maker
from decoding.loop import VERIFIERS
from decoding.machine import busy, processor
from decoding.requests import check_whole
from decoding.results import Row, add_result, identity, read_results, replace
from decoding.table import in_short, table
from mtp import Network, UserError
from mtp.checkpoint import fingerprint
from mtp.network import resolve
from train import quiet, train
from training.config import check_choice
from training.progress import say
from training.prompts import prompts
from training.provenance import provenance

DECODING = ("max_new_tokens", "num_draft_tokens", "verifier")
SETTINGS = ("prompts", "prompt_tokens", *DECODING, "temperature", "repeats", "threads")
LOADING = ("dtype", "device", "packed", "compile")
HELD_OUT = (
    "source",
    "validation_fraction",
    "held_out_fraction",
)  # the keys of `data` that say what is held out
PLACES = ("out", "run_dir", "name", "resume")  # the keys of a training config that no number depends on


@dataclass(frozen=True, slots=True)
class Planned:
    """A row to be: one drafter on one network."""

    network: str
    drafter: str
    build: dict[str, Any]  # the drafter's own config, with _target_
    training: dict[str, Any] | None  # the config that trains the network; None where it is there
    model: str  # the network's folder
    config: dict[str, Any]  # all that the row's numbers depend on

    @property
    def name(self) -> str:
        return f"{self.network}/{self.drafter}"

    @property
    def id(self) -> str:
        return identity(self.config)


def ablate(config: dict[str, Any], argv: list[str]) -> None:
    """The whole table, from the composed config and the command line that led to it."""
    check_config(config)
    quiet()
    torch.set_num_threads(config["threads"])
    rows = chosen(plan(config), config["only"])
    results = Path(config["out"]) / "results.jsonl"
    known = read_results(results)
    pending = [row for row in rows if config["again"] or row.id not in known]
    say(f"{len(rows)} rows, {len(rows) - len(pending)} of them done already in {results}")
    for place, row in enumerate(pending, start=1):
        say(f"[{place}/{len(pending)}] {row.name}")
        if row.training is not None:
            ensure_trained(row.training)
        add_result(results, measure(row, config, argv))
        write_table(rows, results)
    print(write_table(rows, results))


def plan(config: dict[str, Any]) -> list[Planned]:
    """All rows, composed and checked before the first is worked on."""
    rows = []
    for name, network in config["networks"].items():
        check_network(name, network)
        training = compose_training(config, name, network["train"]) if "train" in network else None
        model = training["out"] if training else network["model"]
        for wanted in network["drafters"]:
            build = drafter_config(wanted, f"networks.{name}.drafters")
            made = without_places(training) if training else stored(model, drafter_name(build))
            depends = {key: config[key] for key in (*SETTINGS, "seed", *LOADING)}
            depends |= {"network": made, "drafter": build, "data": held_out(config["data"])}
            rows.append(Planned(name, label(wanted), build, training, model, depends))
    names = [row.name for row in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"networks: {twice[0]} is there twice")
    return rows


def drafter_config(wanted: Any, where: str) -> dict[str, Any]:
    """The config of a drafter that is named, or is {drafter: name, option: value}: with all its options."""
    options = dict(wanted) if isinstance(wanted, dict) else {"drafter": wanted}
    name = options.pop("drafter", None)
    if not isinstance(name, str):
        raise UserError(f"{where}: {wanted!r} is neither a name nor {{drafter: name, option: value}}")
    build = compose("decode", [f"drafter={name}"], where)["drafter"]
    known = [key for key in build if key != "_target_"]
    if unknown := [key for key in options if key not in known]:
        raise UserError(f"{where}: {name} has no option {unknown[0]}; it has {', '.join(known) or 'none'}")
    return build | options


def drafter_name(build: dict[str, Any]) -> str:
    return build["_target_"].split(".")[-2]


def drafter_maker(network: Network, build: dict[str, Any]) -> Build:
    """What builds this drafter anew for every run."""
    return maker(network, drafter_name(build), {key: build[key] for key in build if key != "_target_"})


def label(wanted: str | dict[str, Any]) -> str:
    """A name, and behind it the options.

    >>> label("ngram"), label({"drafter": "early_exit", "exit_layer": 3})
    ('ngram', 'early_exit exit_layer=3')
    """
    if isinstance(wanted, str):
        return wanted
    options = (f"{key}={value}" for key, value in wanted.items() if key != "drafter")
    return " ".join([wanted["drafter"], *options])


def chosen(rows: list[Planned], only: list[str] | None) -> list[Planned]:
    names = [row.name for row in rows]
    if unknown := [name for name in only or [] if name not in names]:
        raise UserError(f"only={unknown[0]} is not one of {', '.join(names)}")
    return [row for row in rows if only is None or row.name in only]


def compose_training(config: dict[str, Any], name: str, overrides: list[str]) -> dict[str, Any]:
    """The config of one training run, which must hold out what the prompts are cut from."""
    where = f"networks.{name}.train"
    training = compose("train", [*config["train"], *overrides, f"seed={config['seed']}"], where)
    if held_out(training["data"]) != held_out(config["data"]):
        raise UserError(f"{where}: data.{', data.'.join(HELD_OUT)} are not those that prompts are cut by")
    folder = Path(config["out"]) / name
    return training | {"out": str(folder / "network"), "run_dir": str(folder), "resume": False}


def held_out(data: dict[str, Any]) -> dict[str, Any]:
    return {key: data.get(key) for key in HELD_OUT}


def compose(config_name: str, overrides: list[str], where: str) -> dict[str, Any]:
    """A config of conf/ as plain data; a mistake is told with the key that the overrides come from."""
    with apart():
        try:
            with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
                return entry.plain(hydra.compose(config_name, overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{where}: {entry.told(error, config_name, overrides)}") from None


@contextmanager
def apart() -> Iterator[None]:
    """Put Hydra aside while it runs, so that other configs can be composed inside its main function."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def stored(model: str, drafter: str) -> dict[str, Any]:
    """What a folder holds: fingerprints of the trunk and of the head that the drafter is named after."""
    folder = resolve(model)
    files = [folder / "heads" / drafter / name for name in ("config.json", "model.safetensors")]
    head = b"".join(file.read_bytes() for file in files if file.is_file())
    return {"trunk": fingerprint(folder), "head": hashlib.sha256(head).hexdigest()}


def without_places(training: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in training.items() if key not in PLACES}


def ensure_trained(training: dict[str, Any]) -> None:
    """Train the network unless it is there; a run of the same config that was stopped goes on."""
    run_dir = Path(training["run_dir"])
    if same(read_provenance(training["out"]).get("config"), training):
        return
    checkpoint, before = run_dir / "checkpoints" / "last.ckpt", run_dir / "config.yaml"
    resume = checkpoint.is_file() and before.is_file()
    if resume and not same(OmegaConf.to_container(OmegaConf.load(before)), training):
        checkpoint.unlink()  # else a stop before the first new one would lead back to it
        resume = False
    try:
        train(training | {"resume": resume})
    except SystemExit:
        say("an ablation goes on by itself: the same command is enough")
        raise


def same(found: Any, training: dict[str, Any]) -> bool:
    return isinstance(found, dict) and identity(without_places(found)) == identity(without_places(training))


def read_provenance(model: str) -> dict[str, Any]:
    """What a folder says of its making; nothing where it says nothing."""
    try:
        return json.loads(Path(model, "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def measure(row: Planned, config: dict[str, Any], argv: list[str]) -> Row:
    """Decode with the row's drafter and plainly; everything that the table and its readers want."""
    network = decode.load({"model": row.model, "heads": None} | {key: config[key] for key in LOADING})
    build = drafter_maker(network, row.build)
    ids = cut_prompts(network, config)
    options = {key: config[key] for key in (*DECODING, "seed")}
    sampling = Sampling(temperature=config["temperature"])
    sampled = generate(network, ids, drafter=build(), sampling=sampling, **options)
    trials = compare(network, build, shown(ids), repeats=config["repeats"], **options)
    if warning := busy(config["threads"]):
        say(f"warning: {warning}")
    made, form = read_provenance(row.model), network.form
    network.unpack()  # its parameters can be counted then
    result = {
        "id": row.id,
        "network": row.network,
        "drafter": row.drafter,
        "model": row.model,
        **provenance(row.config, made.get("validation", {}), ["ablate.py", *argv]),
        "training_tokens": training_tokens(made),
        "parameters": parameters(network, drafter_name(row.build)),
        "settings": {key: config[key] for key in SETTINGS},
        "machine": processor(network.trunk.device),
        "dtype": str(network.trunk.dtype).removeprefix("torch."),
        "form": form,
        "warning": warning,
        "greedy": greedy(trials),
        "sampled": counts(sampled),
    }
    say(in_short(result))
    return result


def cut_prompts(network: Network, config: dict[str, Any]) -> list[list[int]]:
    if network.tokenizer is None:
        raise UserError("networks: one has no tokenizer, so no prompts can be cut for it")
    documents = instantiate(config["data"]).documents("held_out")
    cut = prompts(documents, config["prompts"], network.tokenizer, config["prompt_tokens"], config["seed"])
    return [prompt.token_ids for prompt in cut]


def training_tokens(made: dict[str, Any]) -> int | None:
    """Tokens of the run that saved a network; None where its folder does not say."""
    try:
        trainer, data = made["config"]["trainer"], made["config"]["data"]
        return trainer["max_steps"] * data["batch_size"] * data["row_length"]
    except KeyError:
        return None


def parameters(network: Network, drafter: str) -> dict[str, int]:
    head = network.heads[drafter].parameters() if drafter in network.heads else ()
    return {
        "trunk": sum(parameter.numel() for parameter in network.trunk.parameters()),
        "head": sum(parameter.numel() for parameter in head),
    }


def shown(ids: list[list[int]]) -> Iterable[list[int]]:
    """The prompts, with a progress bar on a terminal."""
    return track(ids, "decoding", console=Console(file=sys.stderr), disable=not sys.stderr.isatty())


def write_table(rows: list[Planned], results: Path) -> str:
    """Write table.md beside the results, with the rows that are done."""
    known = read_results(results)
    text = table([known[row.id] for row in rows if row.id in known])
    replace(results.with_name("table.md"), text)
    return text


def check_config(config: dict[str, Any]) -> None:
    if not config["out"]:
        raise UserError("out is missing: say out=FOLDER, where the table is written")
    if not config["networks"]:
        raise UserError("networks is empty: an experiment names them, as experiment=ablation/smoke does")
    for key in ("prompts", "prompt_tokens", "max_new_tokens", "repeats", "threads"):
        check_whole(key, config[key], 1)
    for key in ("seed", "num_draft_tokens"):
        check_whole(key, config[key], 0)
    check_choice("verifier", config["verifier"], tuple(VERIFIERS))
    check_choice("dtype", config["dtype"], (None, *decode.DTYPES))
    decode.check_form(config)
    Sampling(temperature=config["temperature"])
    for key in ("train", "only"):
        check_texts(key, config[key] or [])


def check_network(name: str, network: Any) -> None:
    if not isinstance(network, dict) or set(network) not in ({"train", "drafters"}, {"model", "drafters"}):
        found = ", ".join(network) if isinstance(network, dict) else repr(network)
        raise UserError(f"networks.{name} has {found}; it needs drafters, and either train or model")
    if "train" in network:
        check_texts(f"networks.{name}.train", network["train"])
    if not isinstance(network["drafters"], list):
        raise UserError(f"networks.{name}.drafters={network['drafters']!r} is not a list of drafters")


def check_texts(key: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"{key}={value!r} is not a list of texts")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    entry.run(functools.partial(ablate, argv=arguments), "ablate", arguments)
