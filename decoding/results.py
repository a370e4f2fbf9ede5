"""results.jsonl: a line of JSON for every row of a table, known by its `id`, which comes from all that it depends on."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from mtp.errors import UserError

Row = dict[str, Any]


def identity(config: dict[str, Any]) -> str:
    """The same for equal plain data, whatever the order of the keys.

    >>> identity({"a": 1, "b": [2]}) == identity({"b": [2], "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def read_results(path: Path) -> dict[str, Row]:
    """All rows by id, in the order of the file; none where there is no file."""
    if not path.is_file():
        return {}
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
            rows[row["id"]] = row
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path} line {number} is not a row with an id; mend the file or move it away"
            ) from None
    return rows


def add_result(path: Path, row: Row) -> None:
    """Append a row, in place of an older one with its id. The file is whole at every moment."""
    rows = {id: old for id, old in read_results(path).items() if id != row["id"]} | {row["id"]: row}
    replace(
        path, "".join(json.dumps(one, ensure_ascii=False, allow_nan=False) + "\n" for one in rows.values())
    )


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
