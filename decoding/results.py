"""results.jsonl: a line of JSON for every row of a table, known by an id made of all that it depends on."""

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
    rows: dict[str, Row] = {}
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if line:
            row = read_row(line, f"{path} line {number}")
            rows[row["id"]] = row
    return rows


def read_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); mend the file or move it away") from None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise UserError(f"{where} is not an object with an id; mend the file or move it away")
    return row


def add_result(path: Path, row: Row) -> None:
    """Append a row, in place of an older one with its id. The file is whole at every moment."""
    rows = read_results(path)
    rows.pop(row["id"], None)
    lines = [json.dumps(one, ensure_ascii=False, allow_nan=False) for one in (*rows.values(), row)]
    replace(path, "\n".join(lines) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
