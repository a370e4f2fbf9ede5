"""Drafters against each other, on the same prompts and seeds: differences with paired intervals."""

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import numpy as np

from ablation.intervals import Sums, of_difference, of_ratio, ratio
from decoding.results import Row

MODES = ("greedy", "token", "block")
Group = tuple[str, str, str, str]  # setting, budget, network, drafter


def comparisons(rows: Iterable[Row]) -> dict[str, Any]:
    """As plain data: τ and deep acceptance of every group of seeds, and their differences.

    All at the draft length that is also decoded with. Pairs are within a setting and budget, and of groups
    with the same seeds and prompts.
    """
    groups = grouped(row for row in rows if row["expected"] and row["drafter"] != "none")
    return {
        "groups": [alone(group, found) for group, found in groups.items()],
        "pairs": [
            pair(first, second, groups)
            for first, second in combinations(groups, 2)
            if first[:2] == second[:2] and comparable(groups[first], groups[second])
        ],
    }


def grouped(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    found: dict[Group, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        key = (row["setting"], row["budget"], row["network"], row["drafter"])
        found.setdefault(key, []).append(row)
    return found


def comparable(first: list[Row], second: list[Row]) -> bool:
    seeds = [[row["seed"] for row in rows] for rows in (first, second)]
    prompts = {len(row["expected"]["by_prompt"]["greedy"]) for row in (*first, *second)}
    return seeds[0] == seeds[1] and len(prompts) == 1


def alone(group: Group, rows: list[Row]) -> dict[str, Any]:
    losses = [row["trunk"]["loss"] - row["trunk"]["loss_alone"] for row in rows if known_loss(row)]
    return {
        "group": list(group),
        "seeds": [row["seed"] for row in rows],
        "tau": {mode: told([sums]) for mode, sums in taus(rows)},
        "deep": {mode: told([sums]) for mode, sums in deep(rows)},
        "loss_change": losses,
    }


def known_loss(row: Row) -> bool:
    return row["trunk"]["loss_alone"] is not None


def pair(first: Group, second: Group, groups: dict[Group, list[Row]]) -> dict[str, Any]:
    """First less second."""
    one, other = groups[first], groups[second]
    return {
        "first": list(first),
        "second": list(second),
        "tau": {mode: told([a, b]) for (mode, a), (_, b) in zip(taus(one), taus(other), strict=False)},
        "deep": {mode: told([a, b]) for (mode, a), (_, b) in zip(deep(one), deep(other), strict=False)},
    }


def told(sums: list[Sums]) -> dict[str, Any]:
    if len(sums) == 1:
        return {"value": finite(ratio(sums[0])), "interval": of_ratio(sums[0])}
    difference = ratio(sums[0]) - ratio(sums[1])
    return {"value": finite(difference), "interval": of_difference(*sums)}


def finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def taus(rows: list[Row]) -> Iterator[tuple[str, Sums]]:
    """mode, tokens and steps [S, P, 2]."""
    for mode in modes(rows):
        yield (
            mode,
            np.array(
                [
                    [[one["tokens"], one["steps"][at(row) - 1]] for one in row["expected"]["by_prompt"][mode]]
                    for row in rows
                ],
                dtype=float,
            ),
        )


def deep(rows: list[Row]) -> Iterator[tuple[str, Sums]]:
    """mode, accepted and tested at depth 2 and beyond [S, P, 2]."""
    for mode in modes(rows):
        yield (
            mode,
            np.array(
                [
                    [
                        [sum(one["accepted"][1:]), sum(one["tested"][1:])]
                        for one in row["expected"]["by_prompt"][mode]
                    ]
                    for row in rows
                ],
                dtype=float,
            ),
        )


def modes(rows: list[Row]) -> list[str]:
    return [mode for mode in MODES if all(mode in row["expected"]["by_prompt"] for row in rows)]


def at(row: Row) -> int:
    return max(1, min(row["settings"]["num_draft_tokens"], len(row["expected"]["greedy"])))
