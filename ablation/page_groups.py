"""Rows of results put together for a reader: by setting, by drafter, over seeds.

A view is one setting with one budget; a group is one drafter on one network of it, with a row for every seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoding.results import Row

SETTINGS = ("equal_parameters", "frozen_trunk", "equal_trunk", "joint")  # shown in this order, others behind
BUDGETS = {"tokens": "equal training tokens", "flops": "equal training FLOPs"}
PLAIN = "none"
YARDSTICKS = ("ngram", "suffix", "draft_model", PLAIN)  # not trained with the trunk, so every trunk has them
ORDER = ("sequential", "parallel", "early_exit", "medusa", "eagle", "hybrid", "layer_skip", *YARDSTICKS)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one drafter under one name, one for every seed (and trunk, where trunks are merged)."""

    label: str
    drafter: str  # without options
    variant: int  # 0, 1, … among the groups of the same drafter
    rows: tuple[Row, ...]

    @property
    def trained(self) -> bool:
        return self.drafter not in YARDSTICKS


@dataclass(frozen=True, slots=True)
class View:
    """One setting with one budget."""

    setting: str
    budget: str | None
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        name = self.setting.replace("_", " ")
        return f"{name}, {BUDGETS.get(self.budget, self.budget)}" if self.budget else name

    def groups(self, *, merged: bool = False) -> list[Group]:
        """By drafter and network; `merged`: yardsticks by drafter alone, over all trunks, and not plain
        decoding."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if not merged or kind(row) != PLAIN:
                over_trunks = merged and kind(row) in YARDSTICKS
                found.setdefault((row["drafter"], "" if over_trunks else row["network"]), []).append(row)
        keys = sorted(found, key=lambda key: rank(key[0].split()[0], ORDER))
        kinds = [drafter.split()[0] for drafter, _ in keys]
        return [
            Group(
                label(*key, alone=kinds.count(kinds[place]) == 1),
                kinds[place],
                kinds[:place].count(kinds[place]),
                tuple(found[key]),
            )
            for place, key in enumerate(keys)
        ]


def views(rows: Iterable[Row]) -> list[View]:
    found: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        found.setdefault((row["setting"], row.get("budget")), []).append(row)
    keys = sorted(found, key=lambda key: rank(key[0], SETTINGS))
    return [View(setting, budget, tuple(found[setting, budget])) for setting, budget in keys]


def rank(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def kind(row: Row) -> str:
    """The drafter's name without its options."""
    return row["drafter"].split()[0]


def label(drafter: str, network: str, *, alone: bool) -> str:
    """What a group is called: as little as tells it from the others of its kind.

    >>> label("ngram", "", alone=True), label("sequential", "sequential_repeated", alone=False)
    ('ngram', 'sequential_repeated')
    >>> label("ngram", "parallel", alone=False)
    'ngram on parallel'
    """
    if alone:
        return drafter.split()[0]
    if network in ("", drafter):
        return drafter
    return network if network.startswith(drafter) else f"{drafter} on {network}"
