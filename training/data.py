"""The data of a training run: text -> documents -> splits -> tokens -> packed rows -> batches.

Letters: B rows a batch, T tokens a row.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mtp.errors import UserError
from training.packing import Rows, tokenize
from training.split import SPLITS, split
from training.text import Document, Source
from training.tokenizer import train_tokenizer

log = logging.getLogger(__name__)

Batch = dict[str, Tensor]  # "tokens" [B, T], "documents" [B, T]


class TextData(lightning.LightningDataModule):
    """Packed rows of a source's text. The keys are explained in conf/data/*.yaml.

    `attach(tokenizer)` comes before the loaders; `train_tokenizer(vocab_size)` makes one of the train split.
    """

    def __init__(
        self,
        source: Source,
        *,
        row_length: int = 256,
        batch_size: int = 16,
        seed: int = 0,
        validation_fraction: float = 0.02,
        held_out_fraction: float = 0.03,
        max_bytes: int | None = None,
        max_validation_rows: int | None = 64,
        cache_dir: str | None = None,
    ):
        super().__init__()
        _check_integer("row_length", row_length, 2)
        _check_integer("batch_size", batch_size, 1)
        _check_integer("seed", seed, 0)
        _check_integer("max_bytes", max_bytes, 1, optional=True)
        _check_integer("max_validation_rows", max_validation_rows, 0, optional=True)
        _check_fractions(validation_fraction, held_out_fraction)
        self.source, self.row_length, self.batch_size, self.seed = source, row_length, batch_size, seed
        self.validation_fraction, self.held_out_fraction = validation_fraction, held_out_fraction
        self.max_bytes, self.max_validation_rows, self.cache_dir = max_bytes, max_validation_rows, cache_dir
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._splits: dict[str, list[Document]] | None = None
        self._batches: BatchStream | None = None
        self._start = 0

    def documents(self, name: str) -> list[Document]:
        """The documents of `train` (as far as `max_bytes` goes), `validation` or `held_out`."""
        if name not in SPLITS:
            raise UserError(f"split must be one of {', '.join(SPLITS)}, found {name!r}")
        if self._splits is None:
            self._splits = self._split()
        return self._splits[name]

    def train_tokenizer(self, vocab_size: int) -> PreTrainedTokenizerFast:
        """A byte-level BPE tokenizer trained on the training split; it is not attached by this."""
        texts = [document.text for document in self.documents("train")]
        return train_tokenizer(texts, vocab_size, cache_dir=self.cache_dir)

    def attach(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use this tokenizer."""
        self.tokenizer = tokenizer

    def train_dataloader(self) -> "BatchStream":
        """Batches without end, the same for the same seed however often training is resumed."""
        rows = self._rows("train", np.random.default_rng(self.seed))
        rank, ranks = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        self._batches = BatchStream(rows, self.batch_size, self.seed, rank=rank, ranks=ranks)
        self._batches.step = self._start
        return self._batches

    def val_dataloader(self) -> Sequence[Any] | DataLoader[Batch]:
        """The validation rows in a fixed order; nothing (and a note) when there are none."""
        if self.max_validation_rows == 0:
            return []
        if not self.documents("validation"):
            log.warning("no validation documents: validation is skipped")
            return []
        # In the order of hashes, not of names, so that the first rows are a fair sample of all.
        try:
            rows: Any = self._rows("validation")
        except UserError as error:
            log.warning("no validation target (%s): validation is skipped", error)
            return []
        if self.max_validation_rows is not None and len(rows) > self.max_validation_rows:
            rows = torch.utils.data.Subset(rows, range(self.max_validation_rows))
        return DataLoader(rows, batch_size=self.batch_size)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Lightning calls this with every batch that it hands to the module."""
        if self._batches is not None and self.trainer is not None and self.trainer.training:
            self._batches.step += 1
        return batch

    # Lightning restores a loader's own state only when it resumes inside an epoch, a data module's always.
    def state_dict(self) -> dict[str, int]:
        return {} if self._batches is None else self._batches.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state.get("step", 0)

    def _split(self) -> dict[str, list[Document]]:
        named = self.source.validation_documents()
        validation = self.validation_fraction if named is None else 0.0
        splits = split(self.source.documents(), validation, self.held_out_fraction, cache_dir=self.cache_dir)
        if named is not None:
            splits["validation"] = named
        if self.max_bytes is not None:
            splits["train"] = _first_bytes(splits["train"], self.max_bytes)
        log.info("documents: %s", ", ".join(f"{len(splits[name])} {name}" for name in SPLITS))
        return splits

    def _rows(self, name: str, shuffle: np.random.Generator | None = None) -> Rows:
        """The rows of one split. The cache knows them in the order of hashes, whatever the seed."""
        if self.tokenizer is None:
            raise RuntimeError("attach a tokenizer before asking for a loader")
        documents = sorted(self.documents(name), key=_place)
        stream = tokenize(documents, self.tokenizer, cache_dir=self.cache_dir)
        if shuffle is not None:
            stream = stream.reordered(shuffle.permutation(len(documents)))
        return Rows(stream, self.row_length, padding=self.tokenizer.pad_token_id or 0)


class BatchStream:
    """Batches without end: batch s is a function of (seed, s), and each epoch is a permutation of all rows.

    `step` is the number of the next batch to be trained on, and the whole state. Whoever trains counts it on
    (with Lightning, TextData does). Reading a batch does not, because Lightning reads one ahead.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, *, rank: int = 0, ranks: int = 1):
        self.rows, self.batch_size, self.seed, self.rank, self.ranks = rows, batch_size, seed, rank, ranks
        self.step = 0
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, itertools.count(self.step))

    def batch(self, step: int) -> Batch:
        """Batch number `step`: `tokens` and `documents`. # [B, T] each"""
        first = (step * self.ranks + self.rank) * self.batch_size
        rows = [self.rows[self._row(first + place)] for place in range(self.batch_size)]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def _row(self, place: int) -> int:
        """The row at this place of the endless sequence of permutations."""
        epoch, place = divmod(place, len(self.rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return int(self._order[place])


def _place(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode()).digest()


def _first_bytes(documents: Sequence[Document], limit: int) -> list[Document]:
    """Documents in the order of hashes up to `limit` bytes; the last is cut, at a line if it can be."""
    taken: list[Document] = []
    for document in sorted(documents, key=_place):
        data = document.text.encode()
        if len(data) > limit:
            text = data[:limit].decode(errors="ignore")
            text = text[: text.rfind("\n") + 1] or text
            return taken + [Document(document.name, text)] if text.strip() else taken or [document]
        taken.append(document)
        limit -= len(data)
    return taken


def _check_integer(key: str, value: object, least: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        also = " or null" if optional else ""
        raise UserError(f"data.{key} must be an integer of at least {least}{also}, found {value!r}")


def _check_fractions(validation: float, held_out: float) -> None:
    for key, value in (("validation_fraction", validation), ("held_out_fraction", held_out)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise UserError(f"data.{key} must be a number from 0 to below 1, found {value!r}")
    if validation + held_out >= 1:
        raise UserError(
            "data.validation_fraction and data.held_out_fraction must be less than 1 together, "
            f"found {validation} + {held_out}"
        )
