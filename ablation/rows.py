"""A row of results.jsonl, put together: what is computed first, what is timed later."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ablation.drafters import drafter_maker, drafter_name, drafter_options
from ablation.expected import choose, every_length, speed
from ablation.flops import cache_bytes, drafting, extra_prefill, layer_cache_bytes, trunk_flops
from ablation.plan import TIMING, Planned
from ablation.prices import DEEP, parts
from ablation.runs import read_provenance
from ablation.subject import Subject
from ablation.text import described, entropy
from ablation.timing import Asked, costs, timed, untimed, with_intervals
from ablation.training import training_facts
from decoding.drafters.draft_model import load
from decoding.machine import busy, processor
from decoding.results import Row, identity
from mtp import Network
from training.progress import say
from training.provenance import provenance

SCHEMA = 2
SHOWN = (
    "prompts",
    "prompt_tokens",
    "max_new_tokens",
    "num_draft_tokens",
    "verifier",
    "temperature",
    "repeats",
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What all rows of one call have in common."""

    config: dict[str, Any]
    arguments: list[str]  # of the command line, `only` left out
    trunk_loss: Callable[[Subject], float]
    loss_alone: Callable[[Planned], float | None]
    shown: Callable[..., Iterable[Any]]

    @property
    def asked(self) -> Asked:
        keys = ("num_draft_tokens", "verifier", "temperature", "seed", "repeats", "longest")
        return Asked(**{key: self.config[key] for key in keys})

    @property
    def timing_id(self) -> str:
        return identity({key: self.config[key] for key in TIMING})


def heading(row: Planned) -> dict[str, Any]:
    """What a row is called."""
    return {
        "id": row.id,
        "content": row.content,
        "setting": row.setting,
        "network": row.network,
        "drafter": row.drafter,
        "seed": row.seed,
        "budget": row.budget,
    }


def computed(row: Planned, subject: Subject, frame: Frame) -> Row:
    """All of a row that no clock tells."""
    network, name = subject.network, drafter_name(row.build)
    config, asked = frame.config, frame.asked
    form = network.form
    told = every_length(subject, row.build, "held_out", asked.longest, measured_at(asked))
    on_validation = every_length(subject, row.build, "validation", asked.longest, measured_at(asked))
    measured = untimed(subject, row.build, asked)
    network.unpack()  # its parameters can be counted then
    draft = load(network, row.build["model"]) if name == "draft_model" else None
    trained = training_facts(row.run, network) if row.run else None
    static = by_weights(network, row, draft, told, asked)
    counted = parameters(network, name)
    network.take_form(form)
    trunk = {"loss": frame.trunk_loss(subject), "loss_alone": frame.loss_alone(row)}
    found = {
        "schema": SCHEMA,
        **heading(row),
        "model": row.model,
        "heads": row.heads,
        **made(row, frame),
        "machine": processor(network.trunk.device),
        "threads": config["threads"],
        "dtype": str(network.trunk.dtype).removeprefix("torch."),
        "form": form,
        "warning": None,
        "settings": {key: config[key] for key in SHOWN},
        "parameters": counted,
        "draft_flops": static["work"].flops,
        "cache_bytes": {
            "trunk": network.trunk.num_layers * layer_cache_bytes(network),
            "head": cache_bytes(network, name, draft, asked.num_draft_tokens),
        },
        "prefill_flops": {
            "trunk": trunk_flops(network),
            "head": extra_prefill(network, name, draft, asked.num_draft_tokens),
        },
        "training": trained,
        "trunk": trunk
        | {"layers": network.trunk.num_layers}
        | {"entropy": entropy(network, subject.texts("held_out", 1.0))}
        | described(subject.texts("held_out", 0.0)),
        "expected": told and told | {"validation": on_validation},
        "measured": measured,
        "timing": None,
        "prices": {"weights": static["prices"], "timed": None},
        "predicted": {
            "speedup": None,
            "draft_cost": None,
            "verify_cost": None,
            "speedup_by_weights": static["speedup"],
            "speedup_32_layers": static["speedup_32"],
            "draft_cost_by_weights": static["c"],
            "draft_cost_32_layers": static["c_32"],
        },
    }
    return with_choice(found, tuned(row))


def measured_at(asked: Asked) -> int:
    return max(1, min(asked.num_draft_tokens, asked.longest))


def made(row: Planned, frame: Frame) -> dict[str, Any]:
    """Command, config, commit, versions. The command makes just this row again."""
    arguments = [*frame.arguments, f'only=["{row.name}"]']
    found = provenance(row.config, {}, ["ablate.py", *arguments])
    validation = read_provenance(row.run.config["out"] if row.run else row.model).get("validation", {})
    return found | {"seed": row.seed, "validation": validation}


def tuned(row: Planned) -> dict[str, Any]:
    """What the training was told, as far as a search may have chosen it: the learning rate, the heads."""
    if row.run is None:
        return {}
    config = row.run.config
    heads = {
        f"heads.{name}.{key}": value
        for name, head in config["heads"].items()
        for key, value in head.items()
        if key != "_target_"
    }
    return {
        "trainer.lr": config["trainer"]["lr"],
        "trainer.max_steps": config["trainer"]["max_steps"],
    } | heads


def by_weights(
    network: Network, row: Planned, draft: Any, told: dict[str, Any] | None, asked: Asked
) -> dict[str, Any]:
    """What the weights read say: here, and on a trunk of 32 layers."""
    name, at = drafter_name(row.build), asked.num_draft_tokens
    work = drafting(network, name, drafter_options(row.build), draft)
    here = parts(network, name, work)
    deep = here.at(DEEP)
    entry = told["greedy"][measured_at(asked) - 1] if told else None
    longest = max(asked.longest, at)
    return {
        "work": work,
        "prices": here.prices(longest),
        "c": here.draft_cost(at),
        "c_32": deep.draft_cost(at),
        "speedup": speed(entry, here.prices(longest)) if entry else None,
        "speedup_32": speed(entry, deep.prices(longest)) if entry else None,
    }


def parameters(network: Network, drafter: str) -> dict[str, int]:
    head = network.heads[drafter].parameters() if drafter in network.heads else ()
    return {
        "trunk": sum(parameter.numel() for parameter in network.trunk.parameters()),
        "head": sum(parameter.numel() for parameter in head),
    }


def with_choice(row: Row, training: dict[str, Any]) -> Row:
    """Draft length and verifier that validation prompts recommend, at timed prices where there are any."""
    told = row["expected"]
    if not told or row["drafter"] == "none":
        return row | {"chosen": {"num_draft_tokens": None, "verifier": None, "training": training}}
    prices = row["prices"]["timed"] or row["prices"]["weights"]
    found = choose(told["validation"], prices)
    by = "timed" if row["prices"]["timed"] else "weights"
    length = found["num_draft_tokens"]
    at_best = speed(told["greedy"][length - 1], prices)
    told = told | {
        "prompts": {
            mode: [[one["tokens"], one["steps"][length - 1]] for one in lines]
            for mode, lines in told["by_prompt"].items()
        }
    }
    chosen = found | {"by": by, "speedup": at_best, "training": training}
    return row | {"expected": told, "chosen": chosen}


def with_times(found: Row, row: Planned, subject: Subject, frame: Frame) -> Row:
    """A row with what the clock says: speeds, and what they were predicted to be."""
    asked, network = frame.asked, subject.network
    fast = timed(subject, row.build, asked, frame.shown)
    drafts = drafter_name(row.build) != "none"
    told = costs(subject, drafter_maker(network, row.build) if drafts else None, asked)
    if warning := busy(frame.config["threads"]):
        say(f"warning: {warning}")
    measured = with_intervals({"greedy": fast, "sampled": found["measured"]["sampled"]})
    entry = found["expected"] and found["expected"]["greedy"][measured_at(asked) - 1]
    predicted = found["predicted"] | {
        "speedup": speed(entry, told["prices"]) if entry else None,
        "draft_cost": told["c"],
        "verify_cost": told["verify"],
    }
    timing = {"id": frame.timing_id} | {key: frame.config[key] for key in TIMING}
    now = found | {
        "measured": measured,
        "predicted": predicted,
        "timing": timing,
        "prices": found["prices"] | {"timed": told["prices"]},
        "machine": processor(network.trunk.device),
        "threads": frame.config["threads"],
        "form": network.form,
        "warning": warning,
        "settings": found["settings"] | {"repeats": frame.config["repeats"]},
    }
    return with_choice(now, found["chosen"]["training"])


def is_timed(found: Row, frame: Frame) -> bool:
    return bool(found.get("timing")) and found["timing"]["id"] == frame.timing_id


def in_short(row: Row) -> str:
    """One line for the terminal."""
    greedy, told = row["measured"]["greedy"], row["predicted"]
    parts = {
        "τ": greedy["tau"],
        "τ sampled": row["measured"]["sampled"]["tau"],
        "c": told["draft_cost"],
        "speedup": greedy["speedup"],
        "by weights": told["speedup_by_weights"],
    }
    shown = [
        f"{key} {value:.2f}" for key, value in parts.items() if value is not None and not math.isnan(value)
    ]
    return ", ".join([*shown, "same ids" if greedy["identical"] else "OTHER IDS"])
