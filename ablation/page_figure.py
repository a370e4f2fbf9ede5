"""The README's figure: τ and speedup of every drafter in one setting, readable on light and on dark."""

from collections.abc import Sequence

from ablation.charts import Axis, Scale, classes, framed, line, marker, scale, text, ticks
from ablation.page_findings import counting
from ablation.page_groups import Group, View, views
from ablation.page_readings import Read, number, speedup, spread, tau
from ablation.page_style import FIGURE_STYLE
from decoding.results import Row

PANEL, GAP, ROW, LETTER = 144, 34, 26, 7.2  # LETTER: a label's letter, at most
LEAST = 440  # what the title needs
TOP, BOTTOM = 80, 26
STROKE = '<path class="stroke" d="M0 -7V7"/>'
OWN_STYLE = """
.back { fill: var(--page); stroke: var(--line); }
svg text.title { font-weight: 600; font-size: 13px; }
.stroke { stroke-width: 3; }
.one { stroke: var(--dim); stroke-dasharray: 4 4; }
"""


def figure(rows: Sequence[Row]) -> str:
    """One SVG of the first view: expected τ, greedy and at temperature 1, and measured speedup."""
    found = views(rows)
    groups = found[0].groups(merged=True) if found else []
    height = TOP + ROW * len(groups) + BOTTOM
    left = max(
        LEAST - 2 * PANEL - GAP - 16, 22 + LETTER * max((len(group.label) for group in groups), default=0)
    )
    width = round(left + 2 * PANEL + GAP + 16)
    names = "".join(
        text(left - 12, TOP + ROW * (place + 0.5) + 4, group.label, "", "end")
        for place, group in enumerate(groups)
    )
    tokens = panel(groups, {"solid": tau("token"), "stroke": tau("greedy")}, left, "τ, tokens per step")
    timed = any(spread(group.rows, speedup) for group in groups)
    read, words = (speedup, "speedup, × plain") if timed else (light_speedup, "predicted speedup")
    speeds = panel(groups, {"solid": read}, left + PANEL + GAP, words)
    told = alternative(groups, found)
    body = (
        f"<style>{FIGURE_STYLE}{OWN_STYLE}</style>"
        f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
        f"{heading(found, left)}{names}{tokens}{speeds}"
    )
    return framed(width, height, told, body)


def light_speedup(row: Row) -> float | None:
    """Foretold by the weights that are read, where nothing was timed."""
    return number(row, "predicted", "speedup_by_weights")


def heading(found: Sequence[View], left: float) -> str:
    """What is shown, and what the two kinds of marks are."""
    if not found:
        return text(14, 24, "no rows yet", "title")
    seeds = len({row["seed"] for row in found[0].rows})
    words = "greedy; thin lines: range" if seeds > 1 else "greedy"
    return (
        text(14, 24, f"{found[0].title.capitalize()}, {counting(seeds, 'seed')}", "title")
        + f'<g class="s" transform="translate({left + 5:.1f} 43)"><circle class="m" r="4.5"/></g>'
        + text(left + 15, 47, "temperature 1", "dim")
        + f'<g class="s" transform="translate({left + 115:.1f} 43)">{STROKE}</g>'
        + text(left + 124, 47, words, "dim")
    )


def panel(groups: Sequence[Group], reads: dict[str, Read], left: float, title: str) -> str:
    """A strip of rows with a mark for every kind of number."""
    found = [one for group in groups for read in reads.values() if (one := spread(group.rows, read))]
    if not found:
        return text(left, TOP - 16, f"{title}: no numbers", "dim")
    ends = [1.0, *(one.low for one in found), *(one.high for one in found)]
    across = scale(Axis("", ticks(min(ends), max(ends), most=4)), ends, left, left + PANEL)
    bottom = TOP + ROW * len(groups)
    parts = [text(left, TOP - 14, title, "dim")]
    for tick in across.ticks:
        parts.append(line(across(tick), TOP - 6, across(tick), bottom, "grid"))
        parts.append(text(across(tick), bottom + 16, f"{tick:g}", "tick", "middle"))
    parts.append(line(across(1), TOP - 6, across(1), bottom, "one"))
    for place, group in enumerate(groups):
        middle = TOP + ROW * (place + 0.5)
        parts += [mark(group, kind, read, across, middle) for kind, read in reads.items()]
    return "".join(parts)


def mark(group: Group, kind: str, read: Read, across: Scale, middle: float) -> str:
    found = spread(group.rows, read)
    if found is None:
        return ""
    shape = marker(group.drafter) if kind == "solid" else STROKE
    whisker = line(across(found.low), middle, across(found.high), middle, "w")
    at = f'<g transform="translate({across(found.mean):.1f} {middle:.1f})">{shape}</g>'
    return f'<g class="{classes(group.drafter, group.variant)}">{whisker}{at}</g>'


def alternative(groups: Sequence[Group], found: Sequence[View]) -> str:
    """The figure in words."""
    parts = []
    for group in groups:
        numbers = [
            f"{name} {one.mean:.2f}"
            for name, read in (
                ("τ at temperature 1", tau("token")),
                ("greedy τ", tau("greedy")),
                ("speedup", speedup),
            )
            if (one := spread(group.rows, read))
        ]
        parts.append(f"{group.label}: {', '.join(numbers) or 'no numbers'}")
    title = found[0].title if found else "no rows"
    return f"τ and speedup by drafter, {title}. {'; '.join(parts)}."
