"""95 % intervals by the bootstrap: prompts drawn anew, and where there are several seeds, seeds too.

Two drafters are compared on the same draws, so what makes a prompt or a seed easy for both cancels out.
Shapes: S seeds, P prompts.
"""

from collections.abc import Callable, Sequence
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


def draws(seeds: int, prompts: int, resamples: int = RESAMPLES) -> list[tuple[Any, Any]]:
    """Seeds and prompts drawn with replacement; the same ones on every call."""
    rng = np.random.default_rng(0)
    return [(rng.integers(seeds, size=seeds), rng.integers(prompts, size=prompts)) for _ in range(resamples)]


def interval(values: Sequence[Sums], measure: Callable[..., float]) -> list[float] | None:
    """Of a number that `measure` tells of some arrays, each [S, P, 2], on the same draws.

    None with a single prompt, which says nothing of others.
    """
    seeds, prompts = values[0].shape[:2]
    if prompts < 2:
        return None
    found = [measure(*(value[s][:, p] for value in values)) for s, p in draws(seeds, prompts)]
    finite = [value for value in found if np.isfinite(value)]
    return [float(limit) for limit in np.percentile(finite, PERCENT)] if finite else None


def of_ratio(sums: Sums) -> list[float] | None:
    """Of one ratio, such as τ = tokens / steps."""
    return interval([sums], ratio)


def of_speedup(drafted: Sums, plain: Sums) -> list[float] | None:
    """Of the ratio of two ratios: tokens a second drafted by tokens a second plain, paired over prompts."""
    return interval([drafted, plain], lambda a, b: ratio(a) / ratio(b))


def of_difference(first: Sums, second: Sums) -> list[float] | None:
    """Of the difference of two ratios, paired over seeds and prompts."""
    return interval([first, second], lambda a, b: ratio(a) - ratio(b))
