"""Rows of results as a Markdown table: where they come from above it, what the columns mean below."""

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
NONE = "n/a"
PACKAGES = ("python", "torch", "transformers")

LEGEND = """\
Tokens: of training. Trunk loss: cross-entropy of the trunk on held-out text, nats a token; in brackets what
the heads did to it: the difference from the same trunk trained without them. Accepted at depth: of the tokens
tested there, that is, drafted with the one before accepted. τ: tokens that a step of the trunk gives, greedy
(plain decoding: 1) and sampled. Expected τ: computed without sampling a draft, greedy / at temperature 1 with
token / with block verification. c: time to draft one token as a multiple of plain decoding's for one; an
early exit gets part of it back, because what it computes is not done again to verify. Speedup: over plain
decoding of the same trunk in the same process, with a 95 % interval over prompts. Predicted: from expected τ
and timed costs; 32 layers: from expected τ and weights read, were the trunk 32 layers deep, which is a
prediction. Best length: recommended by validation prompts. Same ids: greedy decoding gave plain decoding's,
on every prompt, every time. Repeated 4-grams: their share of the greedy text; one that loops is easy to
draft. n/a: no number."""
LEFT = 4  # columns that are no numbers


def table(rows: list[Row]) -> str:
    """The whole document; `n/a` where there is no number, such as α where nothing was drafted."""
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * LEFT + " ---: |" * (len(COLUMNS) - LEFT)]
    body = ["| " + " | ".join(cell(row) for cell in COLUMNS.values()) + " |" for row in rows]
    return "\n".join([*head, *body, "", source(rows), "", LEGEND, ""])


def source(rows: list[Row]) -> str:
    """Command, commit, versions, machine and settings; where rows differ, all that occur."""
    if not rows:
        return "Nothing is done yet."
    settings = {key: distinct(rows, "settings", key) for key in rows[0]["settings"]}
    versions = ", ".join(f"{name} {distinct(rows, 'versions', name)}" for name in PACKAGES)
    return (
        f"`{whole_command(rows)}`, commit {distinct(rows, 'commit')}, seed {distinct(rows, 'seed')}; "
        f"{versions}; {distinct(rows, 'machine')}, {distinct(rows, 'threads')} threads, "
        f"{distinct(rows, 'dtype')}, weights {distinct(rows, 'form')}.\n"
        f"{settings['prompts']} held-out prompts of {settings['prompt_tokens']} tokens, one at a time, "
        f"{settings['max_new_tokens']} new tokens, {settings['num_draft_tokens']} draft tokens, "
        f"{settings['verifier']} verification, sampled at temperature {settings['temperature']}; "
        f"times are medians of {settings['repeats']} runs, plain and drafted in turn."
    )


def whole_command(rows: list[Row]) -> str:
    """The command that makes all rows: each has its own, which ends with the row's name.

    >>> whole_command([{"command": "python ablate.py out=x 'only=[\"a/b\"]'"}])
    'python ablate.py out=x'
    """
    return " or ".join(dict.fromkeys(row["command"].partition(" 'only=[")[0] for row in rows))


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


def trunk_loss(row: Row) -> str:
    """
    >>> trunk_loss({"trunk": {"loss": 2.0, "loss_alone": 1.5}})
    '2.000 (+0.500)'
    """
    loss, alone = row["trunk"]["loss"], row["trunk"]["loss_alone"]
    return number(loss, ".3f") + ("" if alone is None else f" ({loss - alone:+.3f})")


def expected_tau(row: Row) -> str:
    """At the length that is decoded with; greedy, token, block."""
    told = row["expected"]
    at = row["settings"]["num_draft_tokens"]
    if not told or row["drafter"] == "none":
        return NONE
    entries = [
        next((entry for entry in told[mode] if entry["length"] == at), None)
        for mode in ("greedy", "token", "block")
    ]
    return " / ".join(number(entry and entry["tau"]) for entry in entries)


def speedup(row: Row) -> str:
    value, interval = row["measured"]["greedy"]["speedup"], row["measured"]["speedup_interval"]
    return number(value) + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def heading(row: Row) -> str:
    """The setting, and the budget where it is not that of equal tokens."""
    return row["setting"] + ("" if row["budget"] == "tokens" else f", equal {row['budget']}")


def best_length(row: Row) -> str:
    chosen = row["chosen"]
    return (
        NONE if chosen["num_draft_tokens"] is None else f"{chosen['num_draft_tokens']} {chosen['verifier']}"
    )


COLUMNS: dict[str, Callable[[Row], str]] = {
    "setting": heading,
    "network": lambda row: row["network"],
    "drafter": lambda row: row["drafter"],
    "seed": lambda row: str(row["seed"]),
    "tokens": lambda row: number(row["training"] and row["training"]["tokens"], ","),
    "head parameters": lambda row: number(row["parameters"]["head"], ","),
    "draft MFLOPs": lambda row: number(row["draft_flops"] / 1e6),
    "trunk loss": trunk_loss,
    "accepted at depth 1, 2, …": lambda row: by_depth(row["measured"]["greedy"]["conditional"]),
    "τ": lambda row: number(row["measured"]["greedy"]["tau"]),
    "τ sampled": lambda row: number(row["measured"]["sampled"]["tau"]),
    "expected τ": expected_tau,
    "c": lambda row: number(row["measured"]["greedy"]["draft_cost"]),
    "tokens/s": lambda row: number(row["measured"]["greedy"]["tokens_per_second"], ".0f"),
    "speedup": speedup,
    "predicted": lambda row: number(row["predicted"]["speedup"]),
    "32 layers": lambda row: number(row["predicted"]["speedup_32_layers"]),
    "best length": best_length,
    "same ids": lambda row: "yes" if row["measured"]["greedy"]["identical"] else "NO",
    "repeated 4-grams": lambda row: number(row["trunk"]["repeated_4grams"], ".0%"),
}
