"""The tables in docs/: written from results.jsonl between two marks, so that no number is typed by hand.

`python -m ablation.page_numbers` writes all of them anew. A mark names a drafter, or `all`:

    <!-- numbers: sequential -->  …  <!-- end of numbers -->

The rows are those of docs/ablation/*/results.jsonl, unless a file is named, as in
`<!-- numbers: all from docs/log/x.jsonl -->`. Between `<!-- findings: small -->` and
`<!-- end of findings -->` stands what docs/ablation/small says of what published work leads one to expect.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ablation.page_groups import views
from ablation.page_orderings import ORDERINGS, VERDICTS, judgement
from ablation.page_readings import Read, number, spread
from decoding.results import Row, read_results, replace
from decoding.table import NONE

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"<!-- numbers: (?P<drafter>\w+)(?: from (?P<file>\S+))? -->\n.*?<!-- end of numbers -->", re.DOTALL
)
FINDINGS = re.compile(r"<!-- findings: (?P<folder>\w+) -->\n.*?<!-- end of findings -->", re.DOTALL)
HEADINGS = (
    "results", "network", "drafter", "seeds", "accepted at depth 1, 2, … (greedy)", "τ greedy",
    "τ at temperature 1", "c", "speedup",
)  # fmt: skip
TEXT_COLUMNS = 3


def measured(*keys: str | int) -> Read:
    """A number of a row's measurements; rows of the first schema have them at the top."""
    return lambda row: number(row.get("measured") or row, *keys)


NUMBERS = (
    measured("greedy", "tau"),
    measured("sampled", "tau"),
    measured("greedy", "draft_cost"),
    measured("greedy", "speedup"),
)


def written(text: str, root: Path = ROOT) -> str:
    """A page with all its tables as the results say."""
    text = BLOCK.sub(lambda mark: block(mark["drafter"], mark["file"], root), text)
    return FINDINGS.sub(lambda mark: findings(mark["folder"], root), text)


def findings(folder: str, root: Path) -> str:
    """Every expectation, and what each setting of an ablation says of it."""
    rows = read_results(root / "docs/ablation" / folder / "results.jsonl")
    lines = [f"<!-- findings: {folder} -->", ""]
    for ordering in ORDERINGS:
        told = [(view, found) for view in views(rows.values()) if (found := judgement(ordering, view))]
        lines += [f"* **{ordering.claim}.** {ordering.source} {ordering.what}"] if told else []
        lines += [f"  * {VERDICTS[word][0]}: {view.title}, {text}" for view, (word, text) in told]
    return "\n".join([*lines, "", "<!-- end of findings -->"])


def block(drafter: str, file: str | None, root: Path) -> str:
    mark = f"<!-- numbers: {drafter}{f' from {file}' if file else ''} -->"
    return f"{mark}\n\n{table(drafter, sources(file, root))}\n\n<!-- end of numbers -->"


def sources(file: str | None, root: Path) -> dict[str, list[Row]]:
    """Rows by the name of where they are from."""
    paths = [root / file] if file else sorted((root / "docs/ablation").glob("*/results.jsonl"))
    name = {path: path.stem if file else path.parent.name for path in paths}
    return {name[path]: list(read_results(path).values()) for path in paths}


def table(drafter: str, found: dict[str, list[Row]]) -> str:
    """A line for every drafter on every network, means over its seeds."""
    lines = [
        line(source, rows)
        for source, every in found.items()
        for rows in alike(row for row in every if drafter in ("all", base(row)))
    ]
    if not lines:
        return f"No results for `{drafter}` are committed yet."
    rule = "| --- " * TEXT_COLUMNS + "| ---: " * (len(HEADINGS) - TEXT_COLUMNS) + "|"
    return "\n".join([f"| {' | '.join(HEADINGS)} |", rule, *lines])


def base(row: Row) -> str:
    """The drafter without its options."""
    return row["drafter"].split()[0]


def alike(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that differ by their seed alone, together."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row.get("setting"), row.get("budget"), row["network"], row["drafter"])
        found.setdefault(key, []).append(row)
    return list(found.values())


def line(source: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    place = " ".join(str(first[key]) for key in ("setting", "budget", "network") if first.get(key))
    depths = max(len(shares(row)) for row in rows)
    accepted = [shown(rows, measured("greedy", "conditional", depth)) for depth in range(depths)]
    cells = [source, place, f"`{first['drafter']}`", str(len(rows)), " ".join(accepted) or NONE]
    return f"| {' | '.join([*cells, *(shown(rows, read) for read in NUMBERS)])} |"


def shares(row: Row) -> list[float | None]:
    greedy = (row.get("measured") or row).get("greedy") or {}
    return greedy.get("conditional") or []


def shown(rows: Sequence[Row], read: Read) -> str:
    found = spread(rows, read)
    return NONE if found is None else f"{found.mean:.2f}"


def pages(root: Path = ROOT) -> list[Path]:
    """Pages that may have marks: the README and docs/, without what a program writes beside its results."""
    made = lambda path: (path.parent / "results.jsonl").is_file() or path.with_suffix("").is_dir()  # noqa: E731
    own = [path for path in (root / "docs").rglob("*.md") if not made(path)]
    return [root / "README.md", *sorted(own)]


def write_all() -> None:
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            replace(path, new)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    write_all()
