"""Train heads with every objective and tell, in one table, what would be accepted: `python objectives.py`.

`out` gets results.jsonl (a line for every run, as soon as it is done), table.md, and a folder for every run.
The numbers are expectations, computed from the trunk's own continuations of held-out prompts: no draft is
sampled. Started again it goes on with what is missing.
"""

import entry  # first: it sets up Hydra's environment

# isort: split
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

from ablate import compose, held_out, without_places
from decoding.forecast import SELF_FED, Forecast, Written, write
from decoding.requests import check_whole
from decoding.results import Row, add_result, identity, read_results, replace
from mtp import Network, UserError
from train import quiet, train
from training.progress import say
from training.prompts import prompts
from training.readings import KINDS

TEMPERATURES = (0.0, 1.0)
SETTINGS = ("prompts", "prompt_tokens", "new_tokens", "num_draft_tokens")
Texts = dict[float, list[Written]]


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to be."""

    family: str
    kind: str
    seed: int
    training: dict[str, Any]  # its whole config
    id: str

    @property
    def name(self) -> str:
        return f"{self.family}/{self.kind}/{self.seed}"


def objectives(config: dict[str, Any]) -> None:
    """The whole table, from the composed config."""
    check_config(config)
    quiet()
    torch.set_num_threads(config["threads"])
    rows, results, texts = list(plan(config)), Path(config["out"]) / "results.jsonl", Texts()
    known = read_results(results)
    pending = [row for row in rows if row.id not in known]
    say(f"{len(rows)} runs, {len(rows) - len(pending)} of them done already in {results}")
    for place, row in enumerate(pending, start=1):
        say(f"[{place}/{len(pending)}] {row.name}")
        train(row.training)
        found = measure(row, config, texts)
        say("  " + ", ".join(f"τ {found[f'tau_{t:g}']:.3f} at temperature {t:g}" for t in TEMPERATURES))
        add_result(results, found)
        write_table(rows, results)
    print(write_table(rows, results))


def plan(config: dict[str, Any]) -> Iterator[Planned]:
    """All runs, seed by seed, composed and checked before the first is worked on."""
    for seed in config["seeds"]:
        for family, own in config["families"].items():
            for kind in config["kinds"]:
                overrides = [*config["train"], *own, f"++heads.{family}.loss.kind={kind}", f"seed={seed}"]
                training = compose("train", overrides, f"families.{family}")
                trained = [name for name, head in training["heads"].items() if "_target_" in head]
                if family not in trained:
                    heads = ", ".join(trained) or "no head"
                    raise UserError(f"families.{family} trains {heads}: the name has to be that of its head")
                if family in SELF_FED:
                    raise UserError(f"families.{family}: no expected τ can be told of this head")
                if held_out(training["data"]) != held_out(config["data"]):
                    raise UserError(f"families.{family}: its data are not those that prompts are cut from")
                depends = {key: config[key] for key in SETTINGS} | {"training": without_places(training)}
                folder = Path(config["out"]) / f"{family}-{kind}-{seed}"
                places = {"out": str(folder / "network"), "run_dir": str(folder), "save": "heads"}
                yield Planned(family, kind, seed, training | places, identity(depends))


def measure(row: Planned, config: dict[str, Any], texts: Texts) -> Row:
    """The expected τ of the head that was trained; `texts` keeps what the trunk wrote for the first run."""
    model = row.training["trunk"]["path"]
    network = Network.from_pretrained(model, heads=row.training["out"], dtype=torch.float32)
    if not texts:
        say("  the trunk writes the texts")
        ids = cut_prompts(network, config)
        texts |= {t: write(network, ids, t, config["new_tokens"]) for t in TEMPERATURES}
    length = config["num_draft_tokens"]
    forecast = Forecast(
        network, [], heads=[row.family], length=length, temperatures=TEMPERATURES, texts=texts
    )
    found = forecast()[row.family]
    values = {f"tau_{t:g}": found[t].tau for t in TEMPERATURES}
    values |= {f"accepted_{t:g}": found[t].acceptance for t in TEMPERATURES}
    made = {"id": row.id, "family": row.family, "kind": row.kind, "seed": row.seed, "config": row.training}
    return made | values


def cut_prompts(network: Network, config: dict[str, Any]) -> list[list[int]]:
    documents = instantiate(config["data"]).documents("held_out")
    cut = prompts(documents, config["prompts"], network.tokenizer, config["prompt_tokens"])
    return [prompt.token_ids for prompt in cut]


def write_table(rows: list[Planned], results: Path) -> str:
    """Write table.md beside the results, with the runs that are done."""
    known = read_results(results)
    text = table([known[row.id] for row in rows if row.id in known])
    replace(results.with_name("table.md"), text)
    return text


def table(done: list[Row]) -> str:
    """Markdown: a line for every family and objective, mean ± standard deviation over the seeds."""
    lines = ["| head | objective | runs | τ at temperature 0 | τ at temperature 1 |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in done:
        groups.setdefault((row["family"], row["kind"]), []).append(row)
    for (family, kind), found in groups.items():
        cells = [spread([row[f"tau_{t:g}"] for row in found]) for t in TEMPERATURES]
        lines.append(f"| {family} | {kind} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    """Mean and, from two values on, standard deviation.

    >>> spread([2.0, 3.0]), spread([2.0])
    ('2.500 ± 0.707', '2.000')
    """
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def check_config(config: dict[str, Any]) -> None:
    if not config["out"]:
        raise UserError("out is missing: say out=FOLDER, where the table is written")
    for key in (*SETTINGS, "threads"):
        check_whole(key, config[key], 1)
    for key in ("train", "kinds", "seeds"):
        if not isinstance(config[key], list) or not config[key]:
            raise UserError(f"{key}={config[key]!r} is not a list with something in it")
    if unknown := [kind for kind in config["kinds"] if kind not in KINDS]:
        raise UserError(f"kinds names {unknown[0]}, which is not one of {', '.join(KINDS)}")


if __name__ == "__main__":
    entry.run(objectives, "objectives")
