"""Differences between families on one view, seed by seed."""

from collections.abc import Callable
from functools import cache

import numpy as np

from ablation.intervals import PERCENT, draws
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
        return over_draws(*(np.array([found[seed] for seed in seeds]) for found in (more, less)))

    return between


def over_draws(first: np.ndarray, second: np.ndarray) -> list[float] | None:
    """95 % of the difference of two ratios of sums [S, P, 2], when seeds and prompts are drawn anew:
    ablation.intervals.of_difference with all draws at once."""
    seeds, prompts = first.shape[:2]
    if prompts < 2:
        return None
    sums = [np.einsum("rs,rp,spk->rk", *times_drawn(seeds, prompts), one) for one in (first, second)]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = sums[0][:, 0] / sums[0][:, 1] - sums[1][:, 0] / sums[1][:, 1]
    finite = found[np.isfinite(found)]
    return [float(end) for end in np.percentile(finite, PERCENT)] if len(finite) else None


@cache
def times_drawn(seeds: int, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each draw has every seed [R, S] and every prompt [R, P]."""
    drawn = draws(seeds, prompts)
    by_seed = np.array([np.bincount(some, minlength=seeds) for some, _ in drawn], dtype=float)
    by_prompt = np.array([np.bincount(some, minlength=prompts) for _, some in drawn], dtype=float)
    return by_seed, by_prompt


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
