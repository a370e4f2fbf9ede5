"""Charts as SVG text: axes with round ticks, lines, points with whiskers, bars. No library, no script.

Lengths are in units of the view box, one pixel where the chart is shown at its own size. Colours come from
the classes of ablation/page_style.py.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 340, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 18, 12, 40
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # of a drafter's first, second, … variant
SHAPES = {  # a marker of radius 4.5 around 0, 0
    "circle": '<circle class="m" r="4.5"/>',
    "square": '<path class="m" d="M-4 -4h8v8h-8z"/>',
    "triangle": '<path class="m" d="M0 -5.2L5 4H-5z"/>',
    "diamond": '<path class="m" d="M0 -5.6L5.6 0 0 5.6-5.6 0z"/>',
    "down": '<path class="m" d="M0 5.2L5 -4H-5z"/>',
    "hexagon": '<path class="m" d="M-5 0L-2.5 -4.4h5L5 0 2.5 4.4h-5z"/>',
    "x": '<path class="m" transform="rotate(45)" d="M-1.5 -5h3v3.5H5v3H1.5V5h-3V1.5H-5v-3h3.5z"/>',
    "cross": '<path class="m" d="M-1.7 -5h3.4v3.3H5v3.4H1.7V5h-3.4V1.7H-5v-3.4h3.3z"/>',
}
SHAPE_OF = {
    "sequential": "circle",
    "parallel": "square",
    "early_exit": "triangle",
    "medusa": "diamond",
    "eagle": "down",
    "ngram": "cross",
    "suffix": "x",
    "draft_model": "hexagon",
}


@dataclass(frozen=True, slots=True)
class Point:
    """A point, with a whisker from low to high, and what it says when pointed at."""

    x: float
    y: float
    low: float
    high: float
    tip: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one drafter, joined by a line or not."""

    label: str
    drafter: str
    variant: int
    points: tuple[Point, ...]
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """What runs along an axis; `steps`: the ticks, where they should not be chosen from the data."""

    title: str
    steps: tuple[float, ...] = ()
    form: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers to places: `low` at `start`, `high` at `end`."""

    ticks: tuple[float, ...]
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, from at or below low to at or above high.

    >>> ticks(0.0, 1.0), ticks(1.2, 3.9)
    ((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0))
    """
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(n * step, 10) for n in range(first, last + 1))


def scale(axis: Axis, found: Sequence[float], start: float, end: float, margin: float = 0.0) -> Scale:
    most = 6 if start > end else 5  # words below each other need less room than side by side
    marks = axis.steps or ticks(min(found), max(found), most)
    pad = margin * (marks[-1] - marks[0]) or (0.5 if len(marks) == 1 else 0.0)
    return Scale(marks, marks[0] - pad, marks[-1] + pad, start, end)


def chart(
    x_axis: Axis,
    y_axis: Axis,
    series: Sequence[Series],
    told: str,
    *,
    diagonal: bool = False,
    zero: bool = False,
) -> str:
    """One chart; `told` is its text alternative. `diagonal`: both axes alike, with a line where they are
    equal; `zero`: a line at x = 0. Without any point it says so."""
    points = [point for one in series for point in one.points]
    if not points:
        return '<p class="dim">no numbers</p>'
    xs = [point.x for point in points] + ([0.0] if zero else [])
    ys = [value for point in points for value in (point.low, point.high)]
    if diagonal:
        xs = ys = xs + ys + [1.0]
    across = scale(x_axis, xs, LEFT, WIDTH - RIGHT, margin=0.06 if x_axis.steps else 0.0)
    upward = scale(y_axis, ys, HEIGHT - BOTTOM, TOP)
    guides = ""
    if diagonal:
        low, high = max(across.low, upward.low), min(across.high, upward.high)
        guides = line(across(low), upward(low), across(high), upward(high), "guide")
    if zero:
        guides += line(across(0), TOP, across(0), HEIGHT - BOTTOM, "guide")
    asides = [3.0 * (place - (len(series) - 1) / 2) if x_axis.steps else 0.0 for place in range(len(series))]
    body = "".join(drawn(one, across, upward, aside) for one, aside in zip(series, asides, strict=True))
    return framed(WIDTH, HEIGHT, told, axes(x_axis, y_axis, across, upward) + guides + body)


def framed(width: int, height: int, told: str, body: str) -> str:
    """An SVG image with its text alternative."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    words = f'role="img" aria-label="{html.escape(told)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {words}>{body}</svg>'


def axes(x_axis: Axis, y_axis: Axis, across: Scale, upward: Scale) -> str:
    """Grid, ticks and titles."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in upward.ticks:
        parts.append(line(LEFT, upward(tick), right, upward(tick), "grid"))
        parts.append(text(LEFT - 6, upward(tick) + 4, shown(tick, y_axis.form), "tick", "end"))
    for tick in across.ticks:
        parts.append(line(across(tick), bottom, across(tick), bottom + 4, "axis"))
        parts.append(text(across(tick), bottom + 17, shown(tick, x_axis.form), "tick", "middle"))
    parts.append(line(LEFT, bottom, right, bottom, "axis"))
    parts.append(text((LEFT + right) / 2, HEIGHT - 5, x_axis.title, "dim", "middle"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="dim" text-anchor="middle" transform="translate(12 {middle}) rotate(-90)">'
        f"{html.escape(y_axis.title)}</text>"
    )
    return "".join(parts)


def drawn(series: Series, across: Scale, upward: Scale, aside: float) -> str:
    """A series, moved aside a little where all series have points at the same steps; markers shrink where
    there are many."""
    at = [(across(point.x) + aside, upward(point.y), point) for point in series.points]
    parts = []
    if series.joined and len(at) > 1:
        route = " ".join(f"{x:.1f},{y}" for x, y, _ in at)
        parts.append(f'<polyline points="{route}"{dashed(series.variant)}/>')
    for x, y, point in at:
        whisker = line(x, upward(point.low), x, upward(point.high), "w") if point.low < point.high else ""
        mark = marker(series.drafter) if len(at) < 12 else '<circle class="m" r="2.2"/>'
        tip = f"<title>{html.escape(point.tip)}</title>"
        parts.append(f'<g>{tip}{whisker}<g transform="translate({x:.1f} {y})">{mark}</g></g>')
    return f'<g class="{classes(series.drafter, series.variant)}">{"".join(parts)}</g>'


def legend(series: Iterable[Series]) -> str:
    """Name, line and marker of every series, as a list."""
    items = []
    for one in series:
        stroke = f'<path d="M1 7H33"{dashed(one.variant)}/>' if one.joined else ""
        key = f'<g class="{classes(one.drafter, one.variant)}">{stroke}'
        key += f'<g transform="translate(17 7)">{marker(one.drafter)}</g></g>'
        picture = f'<svg viewBox="0 0 34 14" aria-hidden="true">{key}</svg>'
        items.append(f"<li>{picture}<code>{html.escape(one.label)}</code></li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def classes(drafter: str, variant: int) -> str:
    return f"s f-{html.escape(drafter)}{' hollow' if variant % 2 else ''}"


def marker(drafter: str) -> str:
    return SHAPES[SHAPE_OF.get(drafter, "diamond")]


def dashed(variant: int) -> str:
    dash = DASHES[variant % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return f'<path class="{name}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def text(x: float, y: float, words: str, name: str = "", anchor: str = "start") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def shown(value: float, form: str = "") -> str:
    """A tick's number, as short as it can be.

    >>> shown(2.0), shown(0.25), shown(0.5, ".0%"), shown(1500000.0), shown(-0.02)
    ('2', '0.25', '50%', '1.5M', '−0.02')
    """
    if form:
        return format(value, form)
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}".replace("-", "−")
