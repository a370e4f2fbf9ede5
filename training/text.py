"""Where documents come from: the Python standard library and datasets; files.py has files and folders.

A source is a small frozen dataclass with `documents()`; it reads nothing before that call, so that every
mistake of the user's surfaces there as a one-line `UserError`. Lines end at LF only (U+2028 and U+0085 are
text), CRLF becomes LF, a leading byte order mark is dropped.
"""

import logging
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtp.errors import UserError

log = logging.getLogger(__name__)

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text and a name that is the same on every run and every machine."""

    name: str
    text: str


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
            log.info("%d of %d files under %s are not UTF-8 and were left out", skipped, len(paths), root)
        documents = [Document(name, text) for name, text in texts.items() if text and text.strip()]
        if not documents:
            raise UserError(f"data.source.root: no readable .py file with text under {root}")
        return documents

    def validation_documents(self) -> None:
        return None


@dataclass(frozen=True)
class HubDataset:
    """A dataset saved by `save_to_disk`, or whatever `datasets.load_dataset` takes: a folder or a name."""

    path: str | None = None
    name: str | None = None
    split: str = "train"
    field: str = "text"

    def documents(self) -> list[Document]:
        if not self.path:
            raise UserError("data.source.path is not set; give a dataset's folder or its name on the hub")
        rows = self._rows(self.path)
        if self.field not in (rows.column_names or []):
            raise UserError(
                f"data.source.field: {self.path} has no column {self.field!r}; it has {rows.column_names}"
            )
        documents = []
        for number, text in enumerate(rows[self.field]):
            text = checked(text, f"{self.path}, {self.split} record {number}, column {self.field!r}")
            if text.strip():
                documents.append(Document(f"{self.split}:{number}", text))
        if not documents:
            raise UserError(f"data.source.path: no text in split {self.split!r} of {self.path}")
        return documents

    def validation_documents(self) -> None:
        return None

    def _rows(self, path: str) -> Any:
        import datasets  # takes seconds to import, and most runs do without

        folder = Path(path)
        if not folder.exists() and (folder.is_absolute() or path.startswith(".")):
            raise UserError(f"data.source.path: {path} does not exist")
        try:
            if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
                rows = datasets.load_from_disk(path)
                return rows if isinstance(rows, datasets.Dataset) else rows[self.split]
            return datasets.load_dataset(path, name=self.name, split=self.split)
        except Exception as error:  # the library raises many kinds, its own and its backends'
            reason = (str(error).splitlines() or [""])[0]
            message = f"data.source.path: cannot load split {self.split!r} of {path}"
            raise UserError(f"{message}: {type(error).__name__}: {reason}") from error


def walk(root: Path) -> list[Path]:
    """Every visible file under `root`, relative to it, sorted by path."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [Path(folder, name).relative_to(root) for name in files if not name.startswith(".")]
    return sorted(found, key=Path.as_posix)


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
