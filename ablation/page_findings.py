"""What the rows say, in sentences; no number is typed by hand."""

import html
from collections.abc import Callable, Iterator, Sequence

from ablation.page_groups import PLAIN, Group, View, kind
from ablation.page_orderings import orderings, signed, within
from ablation.page_readings import (
    Read,
    Spread,
    deep_acceptance,
    deep_speedup,
    draft_cost,
    interval,
    loss_change,
    speedup,
    tau,
    values,
)
from decoding.results import Row

Ranked = list[tuple[Group, Spread]]


def lead(views: Sequence[View], picture: str) -> str:
    """The page's beginning: a picture of the first view and what it says, then the expected orderings."""
    parts = [f"<p>{line}</p>" for line in counted(views)]
    if views:
        parts.append(f"<h3>With {html.escape(views[0].title)}</h3>{picture}{listed(views[0])}")
        parts.append(f"<h3>What published work leads one to expect</h3>{orderings(views)}")
    return "".join(parts)


def listed(view: View) -> str:
    found = "".join(f"<li>{line}</li>" for line in sentences(view))
    return f'<ul class="lead">{found}</ul>' if found else ""


def counted(views: Sequence[View]) -> Iterator[str]:
    """How much there is, and whether it can be trusted."""
    rows = [row for view in views for row in view.rows]
    counts = {
        "drafter": len({kind(row) for row in rows} - {PLAIN}),
        "setting": len({row["setting"] for row in rows}),
        "seed": len({row["seed"] for row in rows}),
    }
    told = ", ".join(counting(count, noun) for noun, count in counts.items())
    yield f"{counting(len(rows), 'row')}: {told}. {same(rows)}"
    if any(row.get("warning") for row in rows):
        yield "Some rows were measured on a busy machine, as they say at the end; their times are too long."


def same(rows: Sequence[Row]) -> str:
    """Whether greedy decoding with every drafter gave plain decoding's tokens."""
    found = [((row.get("measured") or {}).get("greedy") or {}).get("identical") for row in rows]
    checked = [one for one in found if one is not None]
    if not checked:
        return "Whether greedy output is plain decoding's was not checked."
    if all(checked):
        return (
            f"In all {len(checked)} that were decoded, greedy output was plain decoding's, token for token."
        )
    wrong = checked.count(False)
    return f"<strong>In {wrong} of {len(checked)} greedy output was not plain decoding's.</strong>"


def sentences(view: View) -> Iterator[str]:
    """What a view says of acceptance, of the trunk, of cost and of speed."""
    trained = [group for group in view.groups() if group.trained]
    if deep := ranking(trained, deep_acceptance("token")):
        yield f"{first(deep)} accepts most at depth 2 and deeper at temperature 1: {then(deep, '.0%')}."
    if taus := ranking(trained, tau("token")):
        yield f"{first(taus)} gives most tokens per step at temperature 1: τ {then(taus, '.2f')}."
    yield from trunks(ranking(trained, loss_change, upward=False))
    if costs := ranking(trained, draft_cost, upward=False):
        yield f"{first(costs)} drafts cheapest, in plain steps a token: {then(costs, '.2f')}."
    yield from fastest(view)
    if deep := ranking(view.groups(merged=True), deep_speedup):
        yield (
            f"{first(deep)} would be fastest on a trunk of 32 layers if only reading weights took time "
            f"(a prediction from expected greedy τ, × plain decoding): {then(deep, '.2f')}."
        )


def trunks(changes: Ranked) -> Iterator[str]:
    """What the drafters did to the trunk."""
    if not changes:
        return
    if not any(found.low or found.high for _, found in changes):
        yield "The trunk was not trained along, so its loss is what it was."
        return
    told = ", ".join(f"{code(group)} {within(found, signed)}" for group, found in changes)
    yield f"Training along changed the trunk's held-out loss, in nats a token: {told}."


def fastest(view: View) -> Iterator[str]:
    """Measured speed, yardsticks among the drafters."""
    groups = view.groups(merged=True)
    speeds = ranking(groups, speedup)
    if speeds:
        faster = sum(found.mean > 1 for _, found in speeds)
        own = next((pair for pair in speeds if pair[0].trained), speeds[0])
        trained = "" if own is speeds[0] else f" Of the trained ones {code(own[0])} is."
        yield (
            f"{first(speeds)} is fastest here, × plain decoding: {then(speeds, '.2f')}.{trained} "
            f"{faster} of {len(speeds)} are faster than plain decoding."
        )


def ranking(groups: Sequence[Group], read: Read, *, upward: bool = True) -> Ranked:
    """Groups that have the number, best first, with 95 % intervals over their rows."""
    found = [
        (group, one)
        for group in groups
        if group.drafter != PLAIN and (one := interval(values(group.rows, read)))
    ]
    return sorted(found, key=lambda pair: -pair[1].mean if upward else pair[1].mean)


def first(found: Ranked) -> str:
    return f'<strong class="key">{code(found[0][0])}</strong>'


def then(found: Ranked, form: str) -> str:
    """The first one's number with its interval, then the others': 0.71 (0.69 to 0.73), then `b` 0.55 …"""
    shown: Callable[[float], str] = lambda value: format(value, form)  # noqa: E731
    others = ", ".join(f"{code(group)} {within(one, shown)}" for group, one in found[1:])
    return within(found[0][1], shown) + (f", then {others}" if others else "")


def code(group: Group) -> str:
    return f"<code>{html.escape(group.label)}</code>"


def counting(count: int, noun: str) -> str:
    """
    >>> counting(1, "seed"), counting(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
