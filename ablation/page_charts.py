"""The report's charts: what is drawn of a view's groups, and their text alternatives."""

from collections.abc import Sequence
from statistics import fmean

from ablation.charts import Axis, Point, Series, chart
from ablation.page_facets import WHISKERS, dots, facetted, figure, line_of, prompt_interval, sentence
from ablation.page_groups import Group, View
from ablation.page_readings import Read, expected, loss_change, number, speedup, tau, values
from decoding.results import Row

MODES = {
    "greedy": "greedy",
    "token": "temperature 1, token verification",
    "block": "temperature 1, block verification",
}
CURVES = {"trunk": "next-token loss of the trunk", "head": "loss of the heads"}


def figures(view: View) -> str:
    """All charts of a view, each with its caption."""
    groups = view.groups(merged=True)
    pair = f'<div class="row">{speeds(groups)}{prices(groups)}</div>'
    return lengths(groups) + depths(groups) + pair + curves(groups)


def lengths(groups: Sequence[Group]) -> str:
    """τ against draft length, once for every way to sample and verify."""
    facets = {words: by_length(groups, mode) for mode, words in MODES.items()}
    return facetted(
        "τ by draft length",
        facets,
        Axis("draft tokens asked for", length_steps(groups)),
        "τ, tokens per step",
        "Expected τ, computed by the acceptance ledger on texts of the trunk's own. Heads with fewer depths "
        "than tokens asked for draft what they have. " + WHISKERS,
    )


def depths(groups: Sequence[Group]) -> str:
    """Conditional acceptance by depth, at the longest length that the ledger has."""
    facets = {words: by_depth(groups, mode) for mode, words in MODES.items() if mode != "block"}
    deepest = max((len(one.points) for found in facets.values() for one in found), default=1)
    return facetted(
        "Acceptance by depth",
        facets,
        Axis("depth", tuple(map(float, range(1, max(deepest, 2) + 1)))),
        "accepted of those tested",
        "A token is tested at depth k when those before it were accepted. " + WHISKERS,
    )


def by_length(groups: Sequence[Group], mode: str) -> list[Series]:
    found = []
    for group in groups:
        reads = [(float(at), read_tau(mode, at)) for at in ledger_lengths(group.rows, mode)]
        found.append(line_of(group, mode, reads, "τ"))
    return found


def by_depth(groups: Sequence[Group], mode: str) -> list[Series]:
    found = []
    for group in groups:
        longest = max((len(shares(row, mode)) for row in group.rows), default=0)
        reads = [(float(depth), read_share(mode, depth)) for depth in range(1, longest + 1)]
        found.append(line_of(group, mode, reads, "accepted"))
    return found


def read_tau(mode: str, length: int) -> Read:
    return lambda row: number(expected(row, mode, length), "tau")


def read_share(mode: str, depth: int) -> Read:
    return lambda row: number(shares(row, mode), depth - 1)


def shares(row: Row, mode: str) -> list[float | None]:
    """Conditional acceptance at depth 1, 2, … with the longest draft."""
    return (expected(row, mode) or {}).get("conditional") or []


def ledger_lengths(rows: Sequence[Row], mode: str) -> list[int]:
    entries = [entry for row in rows for entry in (row.get("expected") or {}).get(mode) or []]
    return sorted({entry["length"] for entry in entries if entry})


def length_steps(groups: Sequence[Group]) -> tuple[float, ...]:
    known = {at for group in groups for mode in MODES for at in ledger_lengths(group.rows, mode)}
    return tuple(float(at) for at in sorted(known)) or (1.0, 2.0)


def speeds(groups: Sequence[Group]) -> str:
    """Speedup measured against predicted."""
    predicted: Read = lambda row: number(row, "predicted", "speedup")  # noqa: E731
    series = [dots(group, predicted, speedup, prompt_interval) for group in groups]
    told = "Speedup measured against predicted. " + sentence(series, "predicted", "measured")
    picture = chart(Axis("predicted speedup"), Axis("measured speedup"), series, told, diagonal=True)
    caption = (
        "Greedy, over plain decoding in the same process. Predicted: from expected τ and the measured costs "
        "of drafting and verifying. On the dashed line both agree; below it decoding is slower. "
        "Whiskers: range over seeds; with one seed 95 % over prompts."
    )
    return figure("Speedup, measured and predicted", series, [("", picture)], caption)


def prices(groups: Sequence[Group]) -> str:
    """What training with heads did to the trunk, against what it brings."""
    trained = [group for group in groups if group.trained]
    if not any(values((row for group in trained for row in group.rows), loss_change)):
        return ""  # no trunk was trained along
    series = [dots(group, loss_change, tau("token")) for group in trained]
    told = "Change of the trunk's loss against expected τ. " + sentence(series, "change", "τ")
    picture = chart(
        Axis("change of the trunk's loss, nats"),
        Axis("τ at temperature 1"),
        series,
        told,
        zero=True,
    )
    caption = (
        "Held-out loss against that of the same trunk trained without heads, with the same seed and tokens: "
        "right of the dashed line the heads did it harm. τ with token verification, at the measured length. "
        + WHISKERS
    )
    return figure("What a drafter costs the trunk", series, [("", picture)], caption)


def curves(groups: Sequence[Group]) -> str:
    """Losses during training, one line for every network, mean over seeds where they were logged alike."""
    trained = [group for group in groups if group.trained]
    facets = {words: [curve(group, key) for group in trained] for key, words in CURVES.items()}
    caption = "Every family's heads have a loss of their own, so the second chart does not compare families."
    return facetted("Training", facets, Axis("training tokens"), "loss, nats", f"{caption} {WHISKERS}")


def curve(group: Group, key: str) -> Series:
    found: dict[float, list[float]] = {}
    for row in group.rows:
        for entry in (row.get("training") or {}).get("curve") or []:
            at, loss = number(entry, "tokens"), number(entry, key)
            if at is not None and loss is not None:
                found.setdefault(at, []).append(loss)
    points = [
        Point(
            at,
            fmean(losses),
            min(losses),
            max(losses),
            f"{group.label}, {at:,.0f} tokens: {fmean(losses):.3f}",
        )
        for at, losses in sorted(found.items())
    ]
    return Series(group.label, group.drafter, group.variant, tuple(points))
