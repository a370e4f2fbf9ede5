"""Documents from text and JSONL files: one file, a folder, a glob, or a list of them."""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mtp.errors import UserError
from training.text import Document, as_document, walk


@dataclass(frozen=True)
class Files:
    """One file, folder or glob, or a list of them: each file is one document, each `.jsonl` line is one.

    A line's `field` holds a text, or the messages of a conversation (of which the assistant's are learned).

    `validation` names the files that validate (same forms); they are left out of the other splits.
    """

    path: str | Sequence[str] | None = None
    field: str = "text"
    validation: str | Sequence[str] | None = None

    def documents(self) -> list[Document]:
        named = {path.resolve() for path, _ in self._found("validation")} if self.validation else set()
        found = [(path, name) for path, name in self._found("path") if path.resolve() not in named]
        if not found:
            raise UserError(
                f"data.source.path: every file of {self.path} is named in data.source.validation too"
            )
        documents = [document for path, name in found for document in _read(path, name, self.field)]
        if not documents:
            raise UserError(f"data.source.path: nothing but white space in {self.path}; it needs some text")
        return documents

    def validation_documents(self) -> list[Document] | None:
        if not self.validation:
            return None
        found = self._found("validation")
        return [document for path, name in found for document in _read(path, name, self.field)]

    def _found(self, key: str) -> list[tuple[Path, str]]:
        """Files and the names of their documents, in a stable order, each file once."""
        given = getattr(self, key)
        if not given:
            raise UserError(f"data.source.{key} is not set; give a file, a folder or a glob")
        patterns = [given] if isinstance(given, (str, os.PathLike)) else list(given)
        found: dict[Path, str] = {}
        for pattern in patterns:
            for path, name in _expand(str(pattern), key):
                found.setdefault(path, name)
        return list(found.items())


def _expand(pattern: str, key: str) -> list[tuple[Path, str]]:
    """A file, a folder or a glob -> files and their names relative to the part of it that has no wildcard."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [(path, path.name)]
    if path.is_dir():
        files, root = [path / file for file in walk(path)], path
    else:
        fixed = list(_until_wildcard(path))
        root = Path(*fixed) if fixed else Path()
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not files and not glob.has_magic(pattern):
            raise UserError(f"data.source.{key}: {pattern} does not exist; give a file, a folder or a glob")
    if not files:
        raise UserError(f"data.source.{key}: no file in {pattern}; give a file, a folder or a glob")
    return [(file, PurePosixPath(file.relative_to(root)).as_posix()) for file in files]


def _until_wildcard(path: Path) -> Iterator[str]:
    for part in path.parts:
        if glob.has_magic(part):
            return
        yield part


def _read(path: Path, name: str, field: str) -> list[Document]:
    """The documents of one file; none when it holds only white space."""
    text = _strict_text(path)
    if path.suffix == ".jsonl":
        return _records(path, name, text, field)
    return [Document(name, text)] if text.strip() else []


def _records(path: Path, name: str, text: str, field: str) -> list[Document]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{place} is not JSON: {error}") from error
        if not isinstance(record, dict) or field not in record:
            found = f"keys {list(record)}" if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{place} has no field {field!r} (data.source.field); found {found}")
        document = as_document(f"{name}:{number}", record[field], f"{place}, field {field!r}")
        if document.text.strip():
            documents.append(document)
    return documents


def _strict_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        skipped = len(data) - len(error.object)  # the decoder counts from behind the byte order mark
        line = data.count(b"\n", 0, skipped + error.start) + 1
        raise UserError(f"{path} line {line} is not UTF-8: byte 0x{error.object[error.start]:02x}") from error
