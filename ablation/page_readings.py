"""Numbers of rows: how each is read, and what becomes of several."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from decoding.results import Row

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 97.5 %, for 1, 2, … degrees of freedom
NORMAL = 1.96
Read = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and how far around it; what low and high are, whoever makes it says."""

    mean: float
    low: float
    high: float
    count: int


def number(row: Any, *keys: str | int) -> float | None:
    """The number under these keys, None where there is none on the way or at the end.

    >>> number({"trunk": {"loss": 2}}, "trunk", "loss"), number({"trunk": None}, "trunk", "loss")
    (2.0, None)
    """
    for key in keys:
        if isinstance(row, dict):
            row = row.get(key)
        elif isinstance(row, list) and isinstance(key, int) and key < len(row):
            row = row[key]
        else:
            return None
    whole = isinstance(row, (int, float)) and not isinstance(row, bool)
    return float(row) if whole and math.isfinite(row) else None


def values(rows: Iterable[Row], read: Read) -> list[float]:
    return [value for value in map(read, rows) if value is not None]


def spread(rows: Iterable[Row], read: Read) -> Spread | None:
    """Mean and range over rows; None without a number."""
    found = values(rows, read)
    return Spread(fmean(found), min(found), max(found), len(found)) if found else None


def interval(found: Sequence[float]) -> Spread | None:
    """Mean and its 95 % interval by Student's t; from one number there is none, and low and high are it.

    >>> interval([0.0, 2.0])
    Spread(mean=1.0, low=-11.71, high=13.71, count=2)
    """
    if not found:
        return None
    mean, count = fmean(found), len(found)
    if count == 1:
        return Spread(mean, mean, mean, 1)
    quantile = STUDENT[count - 2] if count - 2 < len(STUDENT) else NORMAL
    half = quantile * stdev(found) / math.sqrt(count)
    return Spread(mean, mean - half, mean + half, count)


def asked_length(row: Row) -> int:
    """Draft tokens that the row was measured with."""
    return int(number(row, "settings", "num_draft_tokens") or 4)


def expected(row: Row, mode: str, length: int | None = None) -> dict[str, Any] | None:
    """The ledger's entry for a mode (greedy, token, block) at a length; None: the longest length."""
    entries = (row.get("expected") or {}).get(mode) or []
    found = [entry for entry in entries if entry and length in (None, entry["length"])]
    return max(found, key=lambda entry: entry["length"], default=None)


def tau(mode: str) -> Read:
    """Expected τ at the length that was measured too."""
    return lambda row: number(expected(row, mode, asked_length(row)), "tau")


def deep_acceptance(mode: str) -> Read:
    """Accepted of all tokens tested at depth 2 and deeper, at the length that was measured."""

    def read(row: Row) -> float | None:
        entry = expected(row, mode, asked_length(row))
        return deeper((entry or {}).get("conditional") or [])

    return read


def deeper(conditional: Sequence[float | None]) -> float | None:
    """From the shares accepted at depth 1, 2, … of those tested there: accepted of all tested below depth 1.

    A token is tested at depth k when all before it were accepted. With 0.5, 1.0, 0.5 there are 0.5 tests at
    depth 2 and as many at depth 3, and 0.5 + 0.25 acceptances.

    >>> deeper([0.5, 1.0, 0.5]), deeper([0.5])
    (0.75, None)
    """
    reached, tested, accepted = 1.0, 0.0, 0.0
    for depth, share in enumerate(conditional, start=1):
        if share is None:
            break
        if depth > 1:
            tested += reached
            accepted += reached * share
        reached *= share
    return accepted / tested if tested else None


def loss_change(row: Row) -> float | None:
    """What training with heads did to the trunk's held-out loss, nats a token."""
    loss, alone = number(row, "trunk", "loss"), number(row, "trunk", "loss_alone")
    return None if loss is None or alone is None else loss - alone


def speedup(row: Row) -> float | None:
    return number(row, "measured", "greedy", "speedup")


def draft_cost(row: Row) -> float | None:
    """Time to draft a token, in plain decoding's time for one."""
    measured = number(row, "measured", "greedy", "draft_cost")
    return number(row, "predicted", "draft_cost") if measured is None else measured


def draft_weights(row: Row) -> float | None:
    """Weights that are read to draft a token, by those of a plain step."""
    return number(row, "predicted", "draft_cost_by_weights")


def deep_speedup(row: Row) -> float | None:
    """Foretold for a trunk of 32 layers, by the weights that are read."""
    return number(row, "predicted", "speedup_32_layers")


def deep_counts(row: Row, mode: str) -> list[list[float]]:
    """By prompt: tokens accepted and tested at depth 2 and deeper; nothing where prompts are not told."""
    prompts = ((row.get("expected") or {}).get("by_prompt") or {}).get(mode) or []
    told = [(one.get("accepted"), one.get("tested")) for one in prompts if one]
    return [[sum(accepted[1:]), sum(tested[1:])] for accepted, tested in told if accepted and tested]
