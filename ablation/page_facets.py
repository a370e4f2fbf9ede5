"""From groups to charts: series with whiskers, charts side by side, captions, and all of it in words."""

from collections.abc import Callable, Sequence

from ablation.charts import Axis, Point, Series, chart, legend, ticks
from ablation.page_groups import Group
from ablation.page_readings import Read, Spread, number, spread
from decoding.results import Row

WHISKERS = "Whiskers: range over seeds (of yardsticks: over seeds and trunks)."
Between = Callable[[Row], tuple[float, float] | None]


def line_of(group: Group, mode: str, reads: Sequence[tuple[float, Read]], what: str) -> Series:
    """A point where there is a number, mean over rows with their range."""
    points = []
    for at, read in reads:
        if found := spread(group.rows, read):
            told = f"{group.label}, {mode}, {at:g}: {what} {ranged(found)}"
            points.append(Point(at, found.mean, found.low, found.high, told))
    return Series(group.label, group.drafter, group.variant, tuple(points))


def dots(group: Group, x: Read, y: Read, between: Between | None = None) -> Series:
    """One point: means over rows, the whisker the range of y, or of a single row its own interval."""
    across, upward = spread(group.rows, x), spread(group.rows, y)
    if across is None or upward is None:
        return Series(group.label, group.drafter, group.variant, (), joined=False)
    low, high = upward.low, upward.high
    if len(group.rows) == 1 and between and (own := between(group.rows[0])):
        low, high = own
    told = f"{group.label}: {across.mean:.3g} across, {upward.mean:.3g} up, {low:.3g} to {high:.3g}"
    point = Point(across.mean, upward.mean, low, high, told)
    return Series(group.label, group.drafter, group.variant, (point,), joined=False)


def prompt_interval(row: Row) -> tuple[float, float] | None:
    """The speedup's interval over prompts."""
    low, high = (number(row, "measured", "speedup_interval", end) for end in (0, 1))
    return None if low is None or high is None else (low, high)


def facetted(title: str, facets: dict[str, list[Series]], x_axis: Axis, y_title: str, caption: str) -> str:
    """Charts side by side with one legend and one scale upward; empty ones left out."""
    facets = {name: [one for one in found if one.points] for name, found in facets.items()}
    ends = [
        end
        for found in facets.values()
        for one in found
        for point in one.points
        for end in (point.low, point.high)
    ]
    y_axis = Axis(y_title, ticks(min(ends), max(ends)) if ends else ())
    pictures = []
    for name, series in facets.items():
        if series:
            told = f"{title}, {name}. {sentence(series, x_axis.title, y_title)}"
            pictures.append((name, chart(x_axis, y_axis, series, told)))
    known = {one.label: one for found in facets.values() for one in found}
    return figure(title, list(known.values()), pictures, caption)


def figure(title: str, series: Sequence[Series], pictures: Sequence[tuple[str, str]], caption: str) -> str:
    shown = [one for one in series if one.points]
    if not shown:
        return f'<figure><h3>{title}</h3><p class="dim">no numbers</p></figure>'
    parts = [f"<div>{f'<h4>{name}</h4>' if name else ''}{picture}</div>" for name, picture in pictures]
    return (
        f'<figure><h3>{title}</h3>{legend(shown)}<div class="row">{"".join(parts)}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def sentence(series: Sequence[Series], x: str, y: str) -> str:
    """The first and last point of every series in words."""
    parts = []
    for one in series:
        if one.points:
            ends = dict.fromkeys((one.points[0], one.points[-1]))
            told = ", ".join(f"{y} {point.y:.3g} at {x} {point.x:.6g}" for point in ends)
            parts.append(f"{one.label}: {told}")
    return "; ".join(parts) + "."


def ranged(found: Spread, form: str = ".2f") -> str:
    """
    >>> ranged(Spread(1.5, 1.25, 1.75, 3)), ranged(Spread(1.5, 1.5, 1.5, 1))
    ('1.50 (1.25 to 1.75, 3 rows)', '1.50')
    """
    mean, low, high = (format(value, form) for value in (found.mean, found.low, found.high))
    return mean if found.count == 1 else f"{mean} ({low} to {high}, {found.count} rows)"
