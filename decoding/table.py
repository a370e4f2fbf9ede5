"""Rows of results as a Markdown table: where they come from above it, what the columns mean below."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
NONE = "n/a"
PACKAGES = ("python", "torch", "transformers")

LEGEND = """\
Trunk loss: cross-entropy of the trunk by itself on validation text, nats a token. Accepted at depth: of the
tokens tested there, that is, drafted with the one before accepted. τ: tokens that a step of the trunk gives,
greedy (plain decoding: 1) and sampled. α: accepted of all tested, greedy. c: time to draft one token as a
multiple of plain decoding's for one; an early exit gets part of it back, because what it computes is not done
again to verify. Speedup: over plain decoding of the same trunk in the same process. Same ids: greedy decoding
gave plain decoding's, on every prompt, every time. Repeated 4-grams: their share of the greedy text; one that
loops is easy to draft."""


def table(rows: list[Row]) -> str:
    """The whole document; `n/a` where there is no number, such as α where nothing was drafted."""
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * 2 + " ---: |" * (len(COLUMNS) - 2)]
    body = ["| " + " | ".join(cell(row) for cell in COLUMNS.values()) + " |" for row in rows]
    return "\n".join([*head, *body, "", source(rows), "", LEGEND, ""])


def in_short(row: Row) -> str:
    """One line for the terminal when a row is done."""
    columns = ("τ", "τ sampled", "α", "c", "tokens/s", "speedup", "same ids")
    return ", ".join(f"{name} {COLUMNS[name](row)}" for name in columns)


def source(rows: list[Row]) -> str:
    """Command, commit, versions, machine and settings; where rows differ, all that occur."""
    settings = {key: distinct(rows, "settings", key) for key in rows[0]["settings"]}
    versions = ", ".join(f"{name} {distinct(rows, 'versions', name)}" for name in PACKAGES)
    return (
        f"`{distinct(rows, 'command')}`, commit {distinct(rows, 'commit')}, seed {distinct(rows, 'seed')}; "
        f"{versions}; {distinct(rows, 'machine')}, {settings['threads']} threads, "
        f"{distinct(rows, 'dtype')}, weights {distinct(rows, 'form')}.\n"
        f"{settings['prompts']} held-out prompts of {settings['prompt_tokens']} tokens, one at a time, "
        f"{settings['max_new_tokens']} new tokens, {settings['num_draft_tokens']} draft tokens, "
        f"{settings['verifier']} verification, sampled at temperature {settings['temperature']}; "
        f"times are medians of {settings['repeats']} runs, plain and drafted in turn."
    )


def distinct(rows: list[Row], *keys: str) -> str:
    """The value under these keys; all of them where rows differ.

    >>> distinct([{"seed": 1}, {"seed": 0}, {"seed": 1}], "seed")
    '1 or 0'
    """
    values: list[Any] = list(rows)
    for key in keys:
        values = [value[key] for value in values]
    return " or ".join(dict.fromkeys("unknown" if value is None else str(value) for value in values))


def number(value: float | None, form: str = ".2f") -> str:
    """
    >>> number(None), number(0.5), number(0.125, ".0%")
    ('n/a', '0.50', '12%')
    """
    return NONE if value is None else format(value, form)


def by_depth(shares: list[float]) -> str:
    """
    >>> by_depth([0.5, 0.25]), by_depth([])
    ('0.50 0.25', 'n/a')
    """
    return " ".join(number(share) for share in shares) or NONE


COLUMNS: dict[str, Callable[[Row], str]] = {
    "network": lambda row: row["network"],
    "drafter": lambda row: row["drafter"],
    "training tokens": lambda row: number(row["training_tokens"], ","),
    "trunk loss": lambda row: number(row["validation"].get("val/trunk/loss"), ".3f"),
    "accepted at depth 1, 2, …": lambda row: by_depth(row["greedy"]["conditional"]),
    "τ": lambda row: number(row["greedy"]["tau"]),
    "τ sampled": lambda row: number(row["sampled"]["tau"]),
    "α": lambda row: number(row["greedy"]["alpha"]),
    "c": lambda row: number(row["greedy"]["draft_cost"]),
    "tokens/s": lambda row: number(row["greedy"]["tokens_per_second"], ".0f"),
    "speedup": lambda row: number(row["greedy"]["speedup"]),
    "same ids": lambda row: "yes" if row["greedy"]["identical"] else "NO",
    "repeated 4-grams": lambda row: number(row["greedy"]["repeated_4grams"], ".0%"),
}
