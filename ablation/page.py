"""The report: one HTML page without anything from elsewhere, and the README's figure, from rows alone."""

import html
from collections.abc import Sequence
from typing import Any

from ablation import page_example
from ablation.page_charts import figures
from ablation.page_figure import figure
from ablation.page_findings import counting, lead, listed
from ablation.page_groups import View, views
from ablation.page_script import SCRIPT
from ablation.page_style import STYLE
from ablation.page_table import group_table, run_table
from decoding.results import Row

__all__ = ["figure", "page"]

SORTING = (
    "Press a heading to sort. Means over seeds, below them the range. What is predicted was not measured."
)
TITLE = "Which built-in drafter?"
WORDS = """\
<p class="dim">τ: tokens per step (one forward pass of the trunk), the trunk's own token included; plain
decoding has 1. Expected: computed exactly from the laws of trunk and drafter on texts of the trunk's own.
In brackets: 95 % intervals over seeds (Student's t; of yardsticks over seeds and trunks); with one seed there
is none.</p>"""


def page(rows: Sequence[Row], example: dict[str, Any] | None) -> str:
    """The whole document; numbers that are missing are told as such, or left out."""
    found = views(rows)
    sections = "".join(section(number, view) for number, view in enumerate(found))
    shown = page_example.section(example) if example and example.get("drafters") else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{TITLE}</h1>{lead(found, overview(rows))}{WORDS}{choice(found)}{sections}{shown}{runs(rows)}"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def overview(rows: Sequence[Row]) -> str:
    return f'<div class="overview">{figure(rows)}</div>' if rows else ""


def choice(found: Sequence[View]) -> str:
    """Which setting is shown; without the script, and on paper, all are."""
    if len(found) < 2:
        return ""
    options = [*((f"v{number}", view.title) for number, view in enumerate(found)), ("all", "all")]
    radios = "".join(
        f'<label><input type="radio" name="view" value="{value}"{" checked" if not place else ""}> '
        f"{html.escape(words)}</label>"
        for place, (value, words) in enumerate(options)
    )
    return f'<fieldset class="choose" hidden><legend>Setting</legend>{radios}</fieldset>'


def section(number: int, view: View) -> str:
    table = f'<h3>All numbers</h3><p class="dim">{SORTING}</p>{group_table(view)}'
    told = listed(view) if number else ""  # the first view's sentences lead the page
    return (
        f'<section data-view="v{number}"><h2>{html.escape(view.title).capitalize()}</h2>{told}{figures(view)}'
        f'<div class="sheet">{table}</div></section>'
    )


def runs(rows: Sequence[Row]) -> str:
    """Every row by itself, and where all of it comes from."""
    if not rows:
        return "<p>There are no rows yet.</p>"
    told = f'<h2>Every run</h2><p class="dim source">{html.escape(source(rows))}.</p>'
    summary = f"<summary>{counting(len(rows), 'row')} with their commands</summary>"
    return f'<section class="sheet">{told}<details>{summary}{run_table(rows)}</details></section>'


def source(rows: Sequence[Row]) -> str:
    """Commit, versions and machine; where rows differ, all that occur."""
    packages = dict.fromkeys(name for row in rows for name in row.get("versions") or {})
    facts = {"commit": ("commit",)} | {name: ("versions", name) for name in packages}
    facts |= {"machine": ("machine",), "threads": ("threads",), "dtype": ("dtype",)}
    return "; ".join(f"{name} {distinct(rows, *keys)}" for name, keys in facts.items())


def distinct(rows: Sequence[Row], *keys: str) -> str:
    """The value under these keys; all of them where rows differ.

    >>> distinct([{"commit": "b"}, {"commit": None}, {"commit": "b"}], "commit")
    'b or unknown'
    """
    found: list[Any] = list(rows)
    for key in keys:
        found = [(value or {}).get(key) for value in found]
    return " or ".join(dict.fromkeys("unknown" if value is None else str(value) for value in found))
