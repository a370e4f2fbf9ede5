"""What a training run took: tokens, FLOPs, seconds, memory and the way its losses went."""

from pathlib import Path
from typing import Any

from ablation.flops import training_flops
from ablation.runs import Run, read_peak
from mtp import Network
from training.metrics import read_rows

SPEED = "train/tokens_per_second"


def training_facts(run: Run, network: Network) -> dict[str, Any]:
    tokens = step_tokens(run)
    total = tokens * run.config["trainer"]["max_steps"]
    metrics = read_metrics(run.folder / "metrics.csv")
    return {
        "tokens": total,
        "flops": total * training_flops(network, run.config),
        "seconds": seconds(metrics, tokens),
        "peak_memory": read_peak(run),
        "curve": curve(metrics, tokens, sorted(run.config["heads"])),
    }


def step_tokens(run: Run) -> int:
    data = run.config["data"]
    return data["batch_size"] * data["row_length"]


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """step -> name -> number."""
    found: dict[int, dict[str, float]] = {}
    for step, name, value in read_rows(path):
        found.setdefault(int(step), {})[name] = float(value)
    return dict(sorted(found.items()))


def seconds(metrics: dict[int, dict[str, float]], tokens: int) -> float:
    """Of all steps, from the speeds that were logged: a run that was stopped in between counts once.

    Validation is left out. Ten tokens a step, ten steps at 50 tokens a second:

    >>> seconds({10: {SPEED: 50.0}}, 10)
    2.0
    """
    total, before = 0.0, 0
    for step, values in metrics.items():
        if SPEED in values:
            total += (step - before) * tokens / values[SPEED]
            before = step
    return total


def curve(metrics: dict[int, dict[str, float]], tokens: int, heads: list[str]) -> list[dict[str, Any]]:
    """Losses on training text as they were logged: the trunk's, and the mean of all that the heads say."""
    found = []
    for step, values in metrics.items():
        own = [
            value
            for name, value in values.items()
            if name.endswith("/loss") and any(name.startswith(f"train/{head}/") for head in heads)
        ]
        point = {
            "trunk": values.get("train/trunk/loss"),
            "head": sum(own) / len(own) if own else None,
        }
        if any(value is not None for value in point.values()):
            found.append({"tokens": step * tokens} | point)
    return found
