"""Two fair budgets: equal tokens, and equal training FLOPs.

With equal FLOPs every family of a setting gets as many as the one that needs least for the experiment's
tokens: its steps are the experiment's times least/own, rounded down, so that none gets more. The trunks that
are trained without heads, as a reference, keep the experiment's tokens.
"""

from collections.abc import Mapping

BUDGETS = ("tokens", "flops")


def equal_flops(steps: int, flops: Mapping[str, int]) -> dict[str, int]:
    """Steps of every family, from what one token costs it; all have the same batches.

    >>> equal_flops(100, {"parallel": 30, "sequential": 40, "early_exit": 20})
    {'parallel': 66, 'sequential': 50, 'early_exit': 100}
    """
    least = min(flops.values())
    return {name: max(1, steps * least // own) for name, own in flops.items()}
