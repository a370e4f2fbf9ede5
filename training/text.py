"""Where documents come from: the Python standard library and datasets; files.py has files and folders.

A source is a small frozen dataclass with `documents()`; it reads nothing before that call, so that every
mistake of the user's surfaces there as a one-line `UserError`. Lines end at LF only (U+2028 and U+0085 are
text), CRLF becomes LF, a leading byte order mark is dropped.
"""

import itertools
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtp.errors import UserError
from training.progress import tell

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


Message = dict[str, str]  # "role" and "content"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and a name that is the same on every run and every machine.

    A conversation has its messages besides; a text that a network wrote has its tokens. Of these only the
    assistant's turns and the tokens from `learn_from` on are learned.
    """

    name: str
    text: str
    messages: list[Message] | None = None
    token_ids: list[int] | None = None
    learn_from: int = 0


class Source(Protocol):
    """Anything that yields documents, and says which of them validate if the user named some."""

    def documents(self) -> list[Document]: ...

    def validation_documents(self) -> list[Document] | None:
        """The documents named for validation; None when the split is to be made by cluster."""


@dataclass(frozen=True)
class Stdlib:
    """The Python standard library's own .py files, in the order of their relative paths."""

    root: str | None = None

    def documents(self) -> list[Document]:
        root = Path(self.root or sysconfig.get_path("stdlib"))
        if not root.is_dir():
            raise UserError(f"data.source.root: {root} is not a folder; give a folder with .py files")
        paths = [path for path in walk(root) if path.suffix == ".py" and not NOT_LIBRARY & set(path.parts)]
        texts = {path.as_posix(): _lenient_text(root / path) for path in paths}
        skipped = sum(text is None for text in texts.values())
        if skipped:
            tell(f"{skipped} of {len(paths)} files under {root} are not UTF-8 and were left out")
        documents = [Document(name, text) for name, text in texts.items() if text and text.strip()]
        if not documents:
            raise UserError(f"data.source.root: no readable .py file with text under {root}")
        return documents

    def validation_documents(self) -> None:
        return None


@dataclass(frozen=True)
class HubDataset:
    """A dataset saved by `save_to_disk`, or whatever `datasets.load_dataset` takes: a folder or a name.

    The column `field` holds texts, or conversations. `records` takes the first so many only; with `streaming`
    no more than these are fetched.
    """

    path: str | None = None
    name: str | None = None
    split: str = "train"
    field: str = "text"
    streaming: bool = False
    records: int | None = None

    def documents(self) -> list[Document]:
        if not self.path:
            raise UserError("data.source.path is not set; give a dataset's folder or its name on the hub")
        if self.records is not None and (type(self.records) is not int or self.records < 1):
            raise UserError(f"data.source.records={self.records!r} is not a whole number from 1 on, nor null")
        if self.streaming and self.records is None:
            raise UserError(
                "data.source.streaming=true needs data.source.records, how many to fetch: "
                "a stream without end has no fixed splits and no exact resume"
            )
        documents = []
        for number, value in enumerate(self._values(self._rows(self.path))):
            place = f"{self.path}, {self.split} record {number}, column {self.field!r}"
            document = as_document(f"{self.split}:{number}", value, place)
            if document.text.strip():
                documents.append(document)
        if not documents:
            raise UserError(f"data.source.path: no text in split {self.split!r} of {self.path}")
        return documents

    def validation_documents(self) -> None:
        return None

    def _values(self, rows: Any) -> Iterable[Any]:
        """The wanted column of the wanted records."""
        if self.field not in (rows.column_names or [self.field]):  # a stream need not know its columns
            raise UserError(
                f"data.source.field: {self.path} has no column {self.field!r}; it has {rows.column_names}"
            )
        if not self.streaming:
            return itertools.islice(rows[self.field], self.records)
        return (record.get(self.field) for record in rows.take(self.records))

    def _rows(self, path: str) -> Any:
        import datasets  # takes seconds to import, and most runs do without

        folder = Path(path)
        if not folder.exists() and (folder.is_absolute() or path.startswith(".")):
            raise UserError(f"data.source.path: {path} does not exist")
        try:
            if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
                rows = datasets.load_from_disk(path)
                return rows if isinstance(rows, datasets.Dataset) else rows[self.split]
            return datasets.load_dataset(path, name=self.name, split=self.split, streaming=self.streaming)
        except Exception as error:  # the library raises many kinds, its own and its backends'
            reason = (str(error).splitlines() or [""])[0]
            message = f"data.source.path: cannot load split {self.split!r} of {path}"
            raise UserError(f"{message}: {type(error).__name__}: {reason}") from error


def walk(root: Path) -> list[Path]:
    """Every visible file under `root`, relative to it, sorted by path."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        inside = Path(folder).relative_to(root)
        found += [inside / name for name in files if not name.startswith(".")]
    return sorted(found, key=Path.as_posix)


def as_document(name: str, value: object, place: str) -> Document:
    """A field of a record: a text, or the messages of a conversation."""
    if not isinstance(value, list):
        return Document(name, checked(value, place))
    messages = [as_message(message, f"{place}, message {number}") for number, message in enumerate(value)]
    return Document(name, "\n".join(message["content"] for message in messages), messages)


def as_message(message: object, place: str) -> Message:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        found = f"keys {list(message)}" if isinstance(message, dict) else type(message).__name__
        raise UserError(f"{place} must have role and content, found {found}")
    return {key: checked(message[key], f"{place}, {key}") for key in ("role", "content")}


def checked(text: object, place: str) -> str:
    """A value from JSON or a dataset as text, or an error that names its place."""
    if not isinstance(text, str):
        raise UserError(f"{place} must be a string, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no UTF-8 text has
        raise UserError(
            f"{place} has a lone surrogate at character {error.start}; text must be Unicode"
        ) from error
    return text.replace("\r\n", "\n")


def _lenient_text(path: Path) -> str | None:
    """The file's text, or None when it is not UTF-8: the library has such files to test its own reader."""
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return None
