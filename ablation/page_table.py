"""The report's tables: a row for every group of a view, and one for every run."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ablation.page_groups import PLAIN, Group, View, kind
from ablation.page_readings import (
    Read,
    Spread,
    asked_length,
    deep_speedup,
    draft_cost,
    draft_weights,
    expected,
    loss_change,
    number,
    speedup,
    spread,
    tau,
)
from decoding.results import Row


@dataclass(frozen=True, slots=True)
class Column:
    """A heading with what it means, and the number below it."""

    heading: str
    meaning: str
    read: Read
    form: str = ".2f"


def path(*keys: str | int) -> Read:
    return lambda row: number(row, *keys)


def identical(row: Row) -> float | None:
    found = ((row.get("measured") or {}).get("greedy") or {}).get("identical")
    return None if found is None else float(found)


def megabytes(row: Row) -> float | None:
    peak = number(row, "training", "peak_memory")
    return None if peak is None else peak / 1e6


COLUMNS = (
    Column("head parameters", "trained beside the trunk", path("parameters", "head"), ",.0f"),
    Column("draft FLOPs", "to draft a token", path("draft_flops"), ",.0f"),
    Column("training tokens", "", path("training", "tokens"), ",.0f"),
    Column("training FLOPs", "trunk and heads", path("training", "flops"), ".2g"),
    Column("training time", "seconds", path("training", "seconds"), ",.0f"),
    Column("peak memory", "of training, MB", megabytes, ",.0f"),
    Column("trunk loss", "held out, nats a token", path("trunk", "loss"), ".3f"),
    Column("Δ loss", "against the same trunk trained alone", loss_change, "+.3f"),
    Column("entropy", "of the trunk's law on its own text, nats", path("trunk", "entropy")),
    Column("distinct-2", "of the trunk's greedy text", path("trunk", "distinct", 1)),
    Column("repeated 4-grams", "of the trunk's greedy text", path("trunk", "repeated_4grams"), ".0%"),
    Column("τ greedy", "expected at the measured length", tau("greedy")),
    Column("τ token", "temperature 1, token verification", tau("token")),
    Column("τ block", "temperature 1, block verification", tau("block")),
    Column("c", "time to draft a token, in plain steps", draft_cost),
    Column("c by weights", "weights read to draft a token, by a step's", draft_weights),
    Column("cache", "bytes a token of text, the drafter's own", path("cache_bytes", "head"), ",.0f"),
    Column("prefill FLOPs", "a prompt token, the drafter's own", path("prefill_flops", "head"), ",.0f"),
    Column("tokens/s", "measured, greedy", path("measured", "greedy", "tokens_per_second"), ",.0f"),
    Column("speedup", "measured, greedy, over plain decoding", speedup),
    Column("predicted", "speedup by the costs measured here", path("predicted", "speedup")),
    Column("by weights", "predicted from weights read", path("predicted", "speedup_by_weights")),
    Column("at 32 layers", "predicted by weights on 32 layers", deep_speedup),
    Column("same ids", "rows whose greedy output was plain decoding's", identical, ".0%"),
)  # fmt: skip


def group_table(view: View) -> str:
    """Means over seeds, with the range where there are several."""
    gains = Column("τ over ngram", "τ token − that of ngram on the same trunk", over_ngram(view), "+.2f")
    at = [column.heading for column in COLUMNS].index("c")
    columns = [*COLUMNS[:at], gains, *COLUMNS[at:]]
    groups = view.groups()
    columns = [column for column in columns if any(spread(group.rows, column.read) for group in groups)]
    heads = heading("drafter", "", text=True)
    heads += heading("accepted at depth 1, 2, …", "of those tested there, at temperature 1", text=True)
    heads += "".join(heading(column.heading, column.meaning) for column in columns)
    body = "".join(
        f"<tr>{name_cell(group)}{depths_cell(group)}{''.join(cell(group, column) for column in columns)}</tr>"
        for group in groups
    )
    caption = f"All numbers of {view.title}: means over seeds, below them the range"
    return scrolling(caption, heads, body)


def over_ngram(view: View) -> Read:
    """What a drafter's τ has over lookup's on the same network and seed."""
    read = tau("token")
    lookup = {(row["network"], row["seed"]): read(row) for row in view.rows if kind(row) == "ngram"}

    def gain(row: Row) -> float | None:
        own, other = read(row), lookup.get((row["network"], row["seed"]))
        return None if own is None or other is None or kind(row) in ("ngram", PLAIN) else own - other

    return gain


def scrolling(caption: str, heads: str, body: str) -> str:
    return (
        f'<div class="wide sheet" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def heading(words: str, meaning: str, *, text: bool = False) -> str:
    title = f' title="{html.escape(meaning)}"' if meaning else ""
    button = f'<button type="button"{title}>{html.escape(words)}</button>'
    return f'<th scope="col"{CLASS_TEXT if text else ""}>{button}</th>'


def name_cell(group: Group) -> str:
    return f"<td><code>{html.escape(group.label)}</code></td>"


def depths_cell(group: Group) -> str:
    longest = max((len(conditional(row)) for row in group.rows), default=0)
    means = [spread(group.rows, share_at(depth)) for depth in range(longest)]
    told = " ".join(f"{one.mean:.2f}" for one in means if one)
    first = f"{means[0].mean}" if means and means[0] else ""
    return f'<td class="text" data-value="{first}">{told or "n/a"}</td>'


def share_at(depth: int) -> Read:
    return lambda row: number(conditional(row), depth)


def conditional(row: Row) -> list[float | None]:
    return (expected(row, "token", asked_length(row)) or {}).get("conditional") or []


def cell(group: Group, column: Column) -> str:
    found = spread(group.rows, column.read)
    if found is None:
        return '<td data-value="">n/a</td>'
    return f'<td data-value="{found.mean}">{ranged(found, column.form)}</td>'


def ranged(found: Spread, form: str) -> str:
    """The mean, and the range below it where numbers differ as shown."""
    mean, low, high = (format(value, form).replace("-", "−") for value in (found.mean, found.low, found.high))
    return mean if low == high else f'{mean}<br><span class="dim">{low}–{high}</span>'


CLASS_TEXT = ' class="text"'
RUNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("network", lambda row: row["network"]),
    ("drafter", lambda row: row["drafter"]),
    ("setting", lambda row: row["setting"].replace("_", " ")),
    ("budget", lambda row: row.get("budget") or "n/a"),
    ("seed", lambda row: str(row["seed"])),
    ("τ token", lambda row: plain(tau("token")(row))),
    ("speedup", lambda row: plain(speedup(row))),
    ("95 % over prompts", lambda row: pair((row.get("measured") or {}).get("speedup_interval"))),
    ("chosen length", lambda row: str((row.get("chosen") or {}).get("num_draft_tokens") or "n/a")),
    ("chosen verifier", lambda row: str((row.get("chosen") or {}).get("verifier") or "n/a")),
    ("warning", lambda row: row.get("warning") or ""),
    ("commit", lambda row: (row.get("commit") or "unknown")[:12]),
    ("command", lambda row: row.get("command") or "unknown"),
)
NUMBERS = ("seed", "τ token", "speedup")


def run_table(rows: Sequence[Row]) -> str:
    """Every row by itself, with the command that makes it again."""
    heads = "".join(heading(name, "", text=name not in NUMBERS) for name, _ in RUNS)
    body = "".join(f"<tr>{''.join(run_cell(name, read(row)) for name, read in RUNS)}</tr>" for row in rows)
    return scrolling("Every run", heads, body)


def run_cell(name: str, words: str) -> str:
    kind = "" if name in NUMBERS else f' class="text{" command" if name == "command" else ""}"'
    value = ' data-value=""' if words == "n/a" else ""
    return f"<td{kind}{value}>{html.escape(words)}</td>"


def plain(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def pair(found: Sequence[float | None] | None) -> str:
    """
    >>> pair([1.0, 1.25]), pair(None), pair([None, None])
    ('1.00–1.25', 'n/a', 'n/a')
    """
    if not found or None in found:
        return "n/a"
    return "–".join(plain(value) for value in found)
