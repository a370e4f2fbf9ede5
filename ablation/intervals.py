"""95 % intervals by the bootstrap: prompts drawn anew, and where there are several seeds, seeds too.

Two drafters are compared on the same draws, so what makes a prompt or a seed easy for both cancels out.
Shapes: S seeds, P prompts, R draws.
"""

import functools
from typing import Any

import numpy as np

RESAMPLES = 2000
PERCENT = (2.5, 97.5)

Sums = np.ndarray  # [S, P, 2] numerator and denominator of a ratio, such as tokens and steps


def ratio(sums: Sums) -> float:
    """Of all seeds and prompts together.

    >>> ratio(np.array([[[3.0, 1.0], [1.0, 1.0]]]))
    2.0
    """
    numerator, denominator = sums.reshape(-1, 2).sum(0)
    return float(numerator / denominator) if denominator else float("nan")


@functools.cache
def draws(seeds: int, prompts: int, resamples: int = RESAMPLES) -> tuple[Any, Any]:
    """How often each seed [R, S] and each prompt [R, P] is drawn with replacement, the same on every call."""
    rng = np.random.default_rng(0)
    drawn = [(rng.integers(seeds, size=seeds), rng.integers(prompts, size=prompts)) for _ in range(resamples)]
    of_seeds = np.array([np.bincount(one, minlength=seeds) for one, _ in drawn])
    return of_seeds, np.array([np.bincount(one, minlength=prompts) for _, one in drawn])


def ratios(sums: Sums) -> Any:
    """The ratio [R] in every draw; nan where nothing is divided by.

    >>> bool((ratios(np.array([[[3.0, 1.0], [6.0, 2.0]]])) == 3.0).all())
    True
    """
    seeds, prompts = draws(*sums.shape[:2])
    by_seed = np.einsum("rp,spk->rsk", prompts, sums)
    numerators, denominators = np.einsum("rs,rsk->kr", seeds, by_seed)
    return np.divide(numerators, denominators, out=np.full(len(seeds), np.nan), where=denominators != 0)


def limits(values: Any, prompts: int) -> list[float] | None:
    """The interval of a number, from its value in every draw.

    None with a single prompt, which says nothing of others.
    """
    finite = values[np.isfinite(values)]
    if prompts < 2 or not len(finite):
        return None
    return [float(limit) for limit in np.percentile(finite, PERCENT)]


def of_ratio(sums: Sums) -> list[float] | None:
    """Of one ratio, such as τ = tokens / steps."""
    return limits(ratios(sums), sums.shape[1])


def of_speedup(drafted: Sums, plain: Sums) -> list[float] | None:
    """Of the ratio of two ratios: tokens a second drafted by tokens a second plain, paired over prompts."""
    return limits(ratios(drafted) / ratios(plain), drafted.shape[1])


def of_difference(first: Sums, second: Sums) -> list[float] | None:
    """Of the difference of two ratios, paired over seeds and prompts."""
    return limits(ratios(first) - ratios(second), first.shape[1])
