"""Train networks alike, decode them alike, compare them in one table: `python ablate.py experiment=ablation/smoke`.

`out` gets results.jsonl (a line for every row, as soon as it is done), table.md, and a folder for every network that
is trained. What is there and was made from the same config is used, so a stopped ablation goes on when started again.
"""

import entry  # first: it sets up Hydra's environment

# isort: split
import functools
import hashlib
import json
import os
import platform
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
from decoding.comparison import compare, counts, greedy, sample
from decoding.report import number
from decoding.requests import check_whole
from decoding.results import Row, add_result, identity, read_results, replace
from decoding.table import table
from mtp import Network, UserError
from mtp.checkpoint import fingerprint
from mtp.network import resolve
from train import quiet, train
from training.prompts import prompts
from training.provenance import provenance

# What a row's numbers depend on beside its network and its drafter.
SETTINGS = (
    "prompts", "prompt_tokens", "max_new_tokens", "num_draft_tokens", "verifier", "temperature", "repeats", "threads",
)  # fmt: skip
HELD_OUT = (
    "source",
    "validation_fraction",
    "held_out_fraction",
)  # of the data: what decides what is held out
PLACES = ("out", "run_dir", "name", "resume")  # of a training config: no number depends on them


@dataclass(frozen=True, slots=True)
class Planned:
    """A row to be: one drafter on one network."""

    network: str
    drafter: str
    build: dict[str, Any]  # the drafter's own config, with _target_
    training: dict[str, Any] | None  # the config of the network's training; None: it is there
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
    known = {} if config["again"] else read_results(results)
    pending = [row for row in rows if row.id not in known]
    say(f"{len(rows)} rows, {len(rows) - len(pending)} of them done in {results}")
    for number_, row in enumerate(pending, start=1):
        say(f"[{number_}/{len(pending)}] {row.name}")
        if row.training is not None:
            ensure_trained(row.training)
        add_result(results, measure(row, config, argv))
        write_table(rows, results)
    write_table(rows, results)
    print(f"{results.with_name('table.md')}\n\n{results.with_name('table.md').read_text(encoding='utf-8')}")


def plan(config: dict[str, Any]) -> list[Planned]:
    """All rows, composed and checked before the first is worked on."""
    rows = []
    for name, network in config["networks"].items():
        check_network(name, network)
        training = compose_training(config, name, network["train"]) if "train" in network else None
        model = training["out"] if training else network["model"]
        for drafter in network["drafters"]:
            build = compose("decode", [f"drafter={drafter}"], f"networks.{name}.drafters")["drafter"]
            made = without_places(training) if training else stored(model, drafter)
            parts = {
                "network": made,
                "drafter": build,
                "data": {key: config["data"][key] for key in HELD_OUT},
            }
            settings = {key: config[key] for key in (*SETTINGS, "seed", "dtype", "device")}
            rows.append(Planned(name, drafter, build, training, model, parts | settings))
    return rows


def chosen(rows: list[Planned], only: list[str] | None) -> list[Planned]:
    names = [row.name for row in rows]
    if unknown := [name for name in only or [] if name not in names]:
        raise UserError(f"only={unknown[0]} is not one of {', '.join(names)}")
    return [row for row in rows if only is None or row.name in only]


def compose_training(config: dict[str, Any], name: str, overrides: list[str]) -> dict[str, Any]:
    """The config that train.py would have, saved in the ablation's folder and held out from the same prompts."""
    where = f"networks.{name}.train"
    training = compose("train", [*config["train"], *overrides, f"seed={config['seed']}"], where)
    if any(training["data"].get(key) != config["data"][key] for key in HELD_OUT):
        raise UserError(
            f"{where}: its data hold out other text than the prompts' (data.{', data.'.join(HELD_OUT)})"
        )
    folder = Path(config["out"]) / name
    return training | {"out": str(folder / "network"), "run_dir": str(folder), "resume": False}


def compose(config_name: str, overrides: list[str], where: str) -> dict[str, Any]:
    """A config of conf/ as plain data; what is wrong with the overrides is told with the key they came from."""
    with apart():
        try:
            with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
                return entry.plain(hydra.compose(config_name, overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{where}: {entry.told(error, config_name, overrides)}") from None


@contextmanager
def apart() -> Iterator[None]:
    """Put Hydra aside while it runs, so that inside its main function other configs can be composed."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def stored(model: str, drafter: str) -> dict[str, Any]:
    """What lies in a network's folder: the trunk's fingerprint and that of the head that the drafter's name says."""
    folder = resolve(model)
    head = folder / "heads" / drafter
    files = sorted(file for file in head.glob("*") if file.name in ("config.json", "model.safetensors"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None
    return {"trunk": fingerprint(folder), "head": digest}


def without_places(training: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in training.items() if key not in PLACES}


def ensure_trained(training: dict[str, Any]) -> None:
    """Train the network unless it is there; a run of the same config that was stopped goes on."""
    folder, run_dir = Path(training["out"]), Path(training["run_dir"])
    if same(read_provenance(folder).get("config"), training):
        return
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    before = run_dir / "config.yaml"
    resume = (
        checkpoint.is_file()
        and before.is_file()
        and same(OmegaConf.to_container(OmegaConf.load(before)), training)
    )
    if not resume:
        checkpoint.unlink(missing_ok=True)  # so that a stop before the first new one does not lead back to it
    try:
        train(training | {"resume": resume})
    except SystemExit:
        say("the same command goes on from there (resume is not needed)")
        raise


def same(found: Any, training: dict[str, Any]) -> bool:
    return isinstance(found, dict) and identity(without_places(found)) == identity(without_places(training))


def read_provenance(folder: Path) -> dict[str, Any]:
    """What the folder says of its making; nothing where it says nothing."""
    try:
        return json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def measure(row: Planned, config: dict[str, Any], argv: list[str]) -> Row:
    """Decode with the row's drafter and plainly, and put everything together that the table and its readers want."""
    network = decode.load(
        {"model": row.model, "heads": None, "dtype": config["dtype"], "device": config["device"]}
    )
    drafter = instantiate(row.build, network=network)
    held_out = instantiate(config["data"]).documents("held_out")
    found = prompts(held_out, config["prompts"], network.tokenizer, config["prompt_tokens"], config["seed"])
    ids = [prompt.token_ids for prompt in found]
    options = {key: config[key] for key in ("max_new_tokens", "num_draft_tokens", "verifier", "seed")}
    sampled = sample(network, drafter, ids, temperature=config["temperature"], **options)
    load = warn_if_busy(config["threads"])
    trials = compare(network, drafter, shown(ids, row.name), repeats=config["repeats"], **options)
    made = read_provenance(Path(row.model))
    result = {
        "id": row.id,
        "network": row.network,
        "drafter": row.drafter,
        "model": row.model,
        **provenance(row.config | {"seed": config["seed"]}, made.get("validation", {}), ["ablate.py", *argv]),
        "training_tokens": training_tokens(made),
        "parameters": parameters(network, row.drafter),
        "settings": {key: config[key] for key in SETTINGS},
        "machine": machine(network),
        "dtype": str(network.trunk.dtype).removeprefix("torch."),
        "load": load,
        "greedy": greedy(trials),
        "sampled": counts(sampled),
    }
    say(told(result))
    return result


def told(result: Row) -> str:
    done = result["greedy"]
    same_ids = "same ids as plain" if done["identical"] else "NOT the ids of plain decoding"
    return (
        f"τ {number(done['tau'])}, sampled {number(result['sampled']['tau'])}, α {number(done['alpha'])}, "
        f"c {number(done['draft_cost'])}, {done['tokens_per_second']:.0f} tokens/s, "
        f"speedup {done['speedup']:.2f}, {same_ids}"
    )


def training_tokens(made: dict[str, Any]) -> int | None:
    """Tokens of the run that saved the network; None where the folder does not say."""
    config = made.get("config", {})
    try:
        return config["trainer"]["max_steps"] * config["data"]["batch_size"] * config["data"]["row_length"]
    except KeyError:
        return None


def parameters(network: Network, drafter: str) -> dict[str, int]:
    head = network.heads[drafter].parameters() if drafter in network.heads else ()
    return {
        "trunk": sum(parameter.numel() for parameter in network.trunk.parameters()),
        "head": sum(parameter.numel() for parameter in head),
    }


def machine(network: Network) -> str:
    """The processor that decodes, by name if it has one."""
    if network.trunk.device.type == "cuda":
        return torch.cuda.get_device_name(network.trunk.device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def warn_if_busy(threads: int) -> float:
    """The load of the last minute; a warning when others are at work, because then times are not to be trusted."""
    load = os.getloadavg()[0]
    if load > 1.5 * threads:
        say(f"warning: the load is {load:.1f} and {threads} threads are used here, so times will be off")
    return load


def shown(ids: list[list[int]], name: str) -> Iterable[list[int]]:
    """The prompts, with a progress bar on a terminal."""
    return track(ids, name, console=Console(file=sys.stderr), disable=not sys.stderr.isatty())


def write_table(rows: list[Planned], results: Path) -> None:
    known = read_results(results)
    if done := [known[row.id] for row in rows if row.id in known]:
        replace(results.with_name("table.md"), table(done))


def check_config(config: dict[str, Any]) -> None:
    if not config["out"]:
        raise UserError("out is missing: say out=FOLDER, where the table is written")
    if not config["networks"]:
        raise UserError("networks is empty: an experiment names them, as experiment=ablation/smoke does")
    for key in ("prompts", "prompt_tokens", "max_new_tokens", "repeats", "threads"):
        check_whole(key, config[key], 1)
    for key in ("seed", "num_draft_tokens"):
        check_whole(key, config[key], 0)


def check_network(name: str, network: dict[str, Any]) -> None:
    found = ", ".join(network) if isinstance(network, dict) else repr(network)
    if not isinstance(network, dict) or set(network) not in ({"train", "drafters"}, {"model", "drafters"}):
        raise UserError(f"networks.{name} has {found}; it needs drafters, and either train or model")
    for key in set(network) - {"model"}:
        if not isinstance(network[key], list) or not all(isinstance(item, str) for item in network[key]):
            raise UserError(f"networks.{name}.{key}={network[key]!r} is not a list of texts")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    entry.run(functools.partial(ablate, argv=arguments), "ablate", arguments)
