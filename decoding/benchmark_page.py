"""What a benchmark found, for a terminal and as a chapter of a Markdown page, from its JSON alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from decoding.standings import OVERALL, PLAIN, TRANSFORMERS
from decoding.table import NONE, by_depth, number

Document = dict[str, Any]
PACKAGES = ("python", "torch", "transformers")

READING = "# How to read these tables"
LEGEND = """\
Speed: tokens a second, and × that of our plain decoding; over several prompts, all tokens by all seconds,
a prompt's seconds being the median of its runs. In brackets: 95 % of what other draws of these prompts
would give (paired bootstrap over prompts); how far the machine's times vary is not in it. τ: tokens by
step of the trunk. α: accepted of all tested draft tokens. Accepted at depth: of the tokens tested there.
Same ids: prompts on which every run gave plain decoding's tokens. Promised: the speed that acceptance
(the exact expectation on plain decoding's texts) and the measured costs of drafting, scoring and reading
the prompt allow, × plain; reached: the share of it that was measured on the same prompts; where the
length is automatic the best fixed length is promised, which a length that follows the text may beat. c:
drafting one token, in steps of plain decoding. Category `unpredictable` is chosen so that lookup finds
nothing, and is no part of the whole."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts; the first column is a name."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def grids(document: Document) -> list[Grid]:
    return [overall(document), by_category(document), scoring(document), drafting(document)]


def overall(document: Document) -> Grid:
    headings = [
        "contender", "tokens/s", "× plain", "× transformers", "τ", "α", "accepted at depth 1, 2, …",
        "same ids", "promised", "reached",
    ]  # fmt: skip
    found = document["standings"][OVERALL]
    rows = [
        [
            name,
            number(one["tokens_per_second"], ".1f"),
            interval(one[f"to_{PLAIN}"]),
            interval(one[f"to_{TRANSFORMERS}"]),
            number(one["tau"]),
            number(one["alpha"]),
            by_depth(one["conditional"]),
            f"{one['identical']} of {one['prompts']}",
            *promised(document["promises"].get(name)),
        ]
        for name, one in found.items()
    ]
    return Grid("all prompts together", headings, rows)


def promised(promise: dict[str, Any] | None) -> tuple[str, str]:
    if promise is None:
        return NONE, NONE
    length, speedup = promise["num_draft_tokens"], promise["whole"]
    return f"×{speedup:.2f} with {length}", number(promise["share"], ".0%")


def by_category(document: Document) -> Grid:
    categories = [name for name in document["standings"] if name != OVERALL]
    rows = [
        [name, *(speed(document["standings"][category][name]) for category in categories)]
        for name in document["standings"][OVERALL]
    ]
    return Grid("speed by category", ["contender", *categories], rows)


def speed(one: dict[str, Any]) -> str:
    return f"{one['tokens_per_second']:.1f} ×{one[f'to_{PLAIN}']['value']:.2f}"


def scoring(document: Document) -> Grid:
    costs = document["costs"]
    widths = list(costs["scoring"])
    row = ["step, in those of one token", *(number(costs["scoring"][width]) for width in widths)]
    return Grid("cost of scoring by tokens scored", ["", *widths], [row])


def drafting(document: Document) -> Grid:
    found = document["costs"]["drafting"].items()
    return Grid(
        "cost of drafting", ["drafter", "c"], [[name, number(one["c"], ".3f")] for name, one in found]
    )


def interval(ratio: dict[str, float] | None) -> str:
    """
    >>> interval({"value": 1.5, "low": 1.234, "high": 1.8}), interval(None)
    ('×1.50 [1.23, 1.80]', 'n/a')
    """
    if ratio is None:
        return NONE
    return f"×{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def lines(document: Document) -> Iterator[str]:
    """The limit of memory, memory itself, and what was left out, in words."""
    roof, memory = document["roofline"], document["memory"]
    yield (
        f"Memory allows {roof['tokens_per_second']:.1f} tokens/s: a step reads "
        f"{roof['weight_bytes_read'] / 1e6:,.0f} MB of weights, at {roof['bandwidth'] / 1e9:.1f} GB/s as "
        f"measured; plain decoding reaches {roof['share']:.0%} of that."
    )
    yield (
        f"Weights {roof['weight_bytes'] / 1e6:,.0f} MB, cache {roof['cache_bytes_per_token'] / 1e3:,.1f} kB "
        f"by token; the process held {memory['ours']['process'] / 1e6:,.0f} MB at most before other "
        f"packages' models were loaded, {memory['all']['process'] / 1e6:,.0f} MB with them{on_gpu(memory)}."
    )
    if document["packages"]:
        yield (
            "Packages: "
            + ", ".join(f"{name} {version}" for name, version in document["packages"].items())
            + "."
        )
    if document["syncs"]:
        counts = ", ".join(f"{name} {one['per_step']:.1f}" for name, one in document["syncs"].items())
        yield f"Waits of the processor for the device, by step: {counts}."
    if document["warning"]:
        yield f"Warning: {document['warning']}."
    for name, reason in document["left_out"].items():
        yield f"Left out: {name} ({reason})."


def on_gpu(memory: dict[str, Any]) -> str:
    """
    >>> on_gpu({"ours": {"gpu": 2_000_000}, "all": {"gpu": 5_000_000}}), on_gpu({"ours": {"gpu": None}})
    ('; on the GPU 2 MB and 5 MB', '')
    """
    if memory["ours"]["gpu"] is None:
        return ""
    ours, every = (memory[whose]["gpu"] / 1e6 for whose in ("ours", "all"))
    return f"; on the GPU {ours:,.0f} MB and {every:,.0f} MB"


def source(document: Document) -> str:
    """Command, commit, versions, machine and settings."""
    versions = ", ".join(f"{name} {document['versions'][name]}" for name in PACKAGES)
    settings = document["settings"]
    return (
        f"`{document['command']}`, commit {document['commit'] or 'unknown'}, {document['date']}; {versions}; "
        f"{document['machine']}, {document['threads']} threads, {document['dtype']}, weights "
        f"{document['form']}. {len(document['prompts'])} prompts, one at a time, greedy, "
        f"{settings['max_new_tokens']} new tokens; every contender {settings['repeats']} times on every "
        "prompt, in turn."
    )


def markdown(document: Document) -> str:
    """A chapter, and one that explains it; no number in it is typed by hand."""
    parts = [heading(document), source(document), "\n".join(f"- {line}" for line in lines(document))]
    for grid in grids(document):
        parts += [f"## {grid.title.capitalize()}", markdown_table(grid)]
    return "\n\n".join([*parts, READING, LEGEND]) + "\n"


def heading(document: Document) -> str:
    """What a chapter is about: measured again, it takes the place of the one with this heading."""
    about = [document["machine"], document["dtype"], f"weights {document['form']}"]
    if categories := document["settings"]["categories"]:
        about.append(" and ".join(categories))
    if not document["settings"]["peers"]:
        about.append("without other packages")
    return f"# {document['model']} on {', '.join(about)}"


def merged(page: str, document: Document) -> str:
    """A page with this run's chapter in it, instead of an older one about the same or as the last."""
    found, new = chapters(page), chapters(markdown(document))
    found[heading(document)] = new[heading(document)]
    found.pop(READING, None)
    found[READING] = new[READING]
    return "\n".join(f"{title}\n{text}".strip() + "\n" for title, text in found.items() if title or text)


def chapters(page: str) -> dict[str, str]:
    """Texts by heading, in order; what stands before the first heading has none.

    >>> chapters("Measured.\\n# a\\n\\n## b\\n# c\\nd\\n")
    {'': 'Measured.', '# a': '\\n## b', '# c': 'd'}
    """
    found: dict[str, list[str]] = {"": []}
    for line in page.splitlines():
        if line.startswith("# "):
            found[line] = []
        else:
            found[list(found)[-1]].append(line)
    return {title: "\n".join(text).rstrip() for title, text in found.items()}


def markdown_table(grid: Grid) -> str:
    """
    >>> print(markdown_table(Grid("", ["a", "b"], [["x", "1"]])))
    | a | b |
    | --- | ---: |
    | x | 1 |
    """
    rule = "| --- |" + " ---: |" * (len(grid.headings) - 1)
    body = [f"| {' | '.join(row)} |" for row in [grid.headings, *grid.rows]]
    return "\n".join([body[0], rule, *body[1:]])


def terminal_table(grid: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=grid.title)
    for index, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in grid.rows:
        table.add_row(*row)
    return table
