"""Differences between families on one view, seed by seed."""

from collections.abc import Callable

import numpy as np

from ablation.intervals import of_difference
from ablation.page_groups import Group, View
from ablation.page_readings import Read, deep_acceptance, deep_counts, loss_change


def plain_group(view: View, drafter: str) -> Group | None:
    """The drafter's group, of several the one without a variant's name."""
    groups = [group for group in view.groups() if group.drafter == drafter]
    named = [group for group in groups if group.label == drafter]
    return next(iter(named or groups), None)


def by_seed(group: Group | None, read: Read) -> dict[int, float]:
    rows = group.rows if group else ()
    return {row["seed"]: value for row in rows if (value := read(row)) is not None}


def deeper_than_parallel(mode: str) -> Callable[[View], list[float]]:
    read = deep_acceptance(mode)

    def differences(view: View) -> list[float]:
        more, less = (by_seed(plain_group(view, name), read) for name in ("sequential", "parallel"))
        return [more[seed] - less[seed] for seed in more if seed in less]

    return differences


def deeper_over_prompts(mode: str) -> Callable[[View], list[float] | None]:
    """The same difference with an interval over seeds and prompts, both drawn anew, in pairs."""

    def between(view: View) -> list[float] | None:
        more, less = (counts(plain_group(view, name), mode) for name in ("sequential", "parallel"))
        seeds = [seed for seed in more if seed in less]
        sizes = {len(found[seed]) for found in (more, less) for seed in seeds}
        if len(sizes) != 1 or 0 in sizes:
            return None
        return of_difference(*(np.array([found[seed] for seed in seeds]) for found in (more, less)))

    return between


def counts(group: Group | None, mode: str) -> dict[int, list[list[float]]]:
    """By seed and prompt."""
    return {row["seed"]: deep_counts(row, mode) for row in (group.rows if group else ())}


def early_exit_costs(view: View) -> list[float]:
    """Nothing where the trunk was not trained: it cannot have changed."""
    found = list(by_seed(plain_group(view, "early_exit"), loss_change).values())
    return found if any(found) else []


def cheaper_than_others(read: Read) -> Callable[[View], list[float]]:
    """How much more the cheapest other family costs than `parallel`, seed by seed."""

    def differences(view: View) -> list[float]:
        own = by_seed(plain_group(view, "parallel"), read)
        others = [by_seed(plain_group(view, name), read) for name in ("sequential", "early_exit")]
        found = []
        for seed, cost in own.items():
            costs = [other[seed] for other in others if seed in other]
            found += [min(costs) - cost] if costs else []
        return found

    return differences
