"""Orderings that published work leads one to expect, and whether the rows bear them out."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ablation.page_differences import (
    cheaper_than_others,
    deeper_over_prompts,
    deeper_than_parallel,
    early_exit_costs,
)
from ablation.page_groups import View
from ablation.page_readings import (
    Spread,
    draft_cost,
    draft_weights,
    interval,
)

VERDICTS = {  # what a verdict is called, and its colour's class
    "confirmed": ("confirmed", "yes"),
    "contradicted": ("contradicted", "against"),
    "undecided": ("undecided", ""),
    "agrees": ("one seed, agrees", ""),
    "disagrees": ("one seed, disagrees", ""),
}


@dataclass(frozen=True, slots=True)
class Ordering:
    """One expectation: that the differences, one a seed, are above zero."""

    claim: str
    source: str
    what: str  # the difference is
    form: Callable[[float], str]
    differences: Callable[[View], list[float]]
    over_prompts: Callable[[View], list[float] | None] = lambda view: None  # an interval over prompts too


def verdict(differences: Sequence[float], over_prompts: Sequence[float] | None = None) -> str | None:
    """By the 95 % interval of the differences over seeds, and by that over seeds and prompts where there is
    one: both must lie on one side of zero. None without any difference; of one seed only its sign.

    >>> verdict([1.0, 1.1, 0.9]), verdict([-1.0, -1.1, -1.0]), verdict([1.0, -1.0])
    ('confirmed', 'contradicted', 'undecided')
    >>> verdict([0.5]), verdict([-0.5]), verdict([])
    ('agrees', 'disagrees', None)
    >>> verdict([1.0, 1.1, 0.9], [-0.1, 2.0])
    'undecided'
    """
    found = interval(differences)
    if found is None:
        return None
    if found.count == 1:
        return "agrees" if found.mean > 0 else "disagrees"
    ends = [found.low, found.high, *(over_prompts or ())]
    if min(ends) > 0:
        return "confirmed"
    return "contradicted" if max(ends) < 0 else "undecided"


def points(value: float) -> str:
    """
    >>> points(0.214), points(-0.01)
    ('+21.4', '−1.0')
    """
    return f"{100 * value:+.1f}".replace("-", "−")


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


DEEPER = "Sequential modules accept more than parallel heads at depth 2 and deeper"
SEES = "DeepSeek-V3 (2412.19437), EAGLE (2401.15077): a drafter that sees its own tokens guesses better."
ORDERINGS = (
    Ordering(
        f"{DEEPER}, at temperature 1",
        SEES,
        "Difference in the share accepted of all tokens tested there, in percentage points.",
        points,
        deeper_than_parallel("token"),
        deeper_over_prompts("token"),
    ),
    Ordering(
        f"{DEEPER}, greedily",
        SEES,
        "Difference in the share accepted of all tokens tested there, in percentage points.",
        points,
        deeper_than_parallel("greedy"),
        deeper_over_prompts("greedy"),
    ),
    Ordering(
        "Early exit costs the trunk something",
        "LayerSkip (2404.16710), its tables of last-layer quality.",
        "Held-out loss minus that of the same trunk trained without exits, in nats a token.",
        signed,
        early_exit_costs,
    ),
    Ordering(
        "Parallel drafts are the cheapest of the three families, by the clock",
        "Gloeckle et al. (2404.19737): one layer a head, side by side.",
        "Time for a drafted token with the cheapest other family minus that with parallel heads, in steps.",
        signed,
        cheaper_than_others(draft_cost),
    ),
    Ordering(
        "Parallel drafts are the cheapest of the three families, by the weights read",
        "The same, where memory is what limits decoding.",
        "Weights for a drafted token with the cheapest other family minus those with parallel heads.",
        signed,
        cheaper_than_others(draft_weights),
    ),
)


def orderings(views: Sequence[View]) -> str:
    """Every expectation, and what each view says of it."""
    return f'<ul class="findings">{"".join(ordered(one, views) for one in ORDERINGS)}</ul>'


def ordered(ordering: Ordering, views: Sequence[View]) -> str:
    lines = [judged(ordering, view) for view in views]
    body = "".join(lines) or '<li class="dim">no numbers</li>'
    return (
        f'<li><strong>{ordering.claim}.</strong> <span class="dim">{ordering.source} {ordering.what}</span>'
        f"<ul>{body}</ul></li>"
    )


def judged(ordering: Ordering, view: View) -> str:
    """One view's verdict; empty where it has no numbers for it."""
    found = judgement(ordering, view)
    if found is None:
        return ""
    (name, colour), told = VERDICTS[found[0]], found[1]
    return f'<li><span class="chip {colour}">{name}</span> {html.escape(view.title)}: {told}</li>'


def judgement(ordering: Ordering, view: View) -> tuple[str, str] | None:
    """One view's verdict, and the numbers that it rests on; None where it has none."""
    differences = ordering.differences(view)
    over_prompts = ordering.over_prompts(view)
    found, word = interval(differences), verdict(differences, over_prompts)
    if found is None or word is None:
        return None
    told = within(found, ordering.form)
    if over_prompts:
        low, high = map(ordering.form, over_prompts)
        told += f"; over {'seeds and ' if found.count > 1 else ''}prompts {low} to {high}"
    return word, told


def within(found: Spread, form: Callable[[float], str]) -> str:
    """A mean and its interval; one number has none.

    >>> within(Spread(0.5, 0.4, 0.6, 3), str), within(Spread(0.5, 0.5, 0.5, 1), str)
    ('0.5 (0.4 to 0.6)', '0.5')
    """
    return (
        form(found.mean)
        if found.count == 1
        else f"{form(found.mean)} ({form(found.low)} to {form(found.high)})"
    )
