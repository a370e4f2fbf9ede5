"""The data of a training run: text -> documents -> splits -> tokens -> packed rows -> batches.

Letters: B rows a batch, T tokens a row.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mtp import Trunk, UserError
from training.batches import Batch, BatchStream, Share
from training.packing import Rows, Stream, tokenize
from training.progress import tell
from training.prompts import prompts
from training.self_distilled import ContinueText, SelfDistilled
from training.split import SPLITS, first_bytes, hashed, split
from training.states import DTYPES, Wanted, WithStates, with_states, write_states
from training.text import Document, Source
from training.tokenizer import train_tokenizer

log = logging.getLogger(__name__)


class TextData(lightning.LightningDataModule):
    """Packed rows of a source's text. The keys are explained in conf/data/*.yaml.

    `attach(tokenizer)` comes before the loaders; `train_tokenizer(vocab_size)` makes one of the train split.
    With `states` or `self_distilled`, so does `attach_trunk`.
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
        isolate: bool = False,
        states: str | None = None,
        self_distilled: SelfDistilled | None = None,
        cache_dir: str | None = None,
    ):
        super().__init__()
        _check_integer("row_length", row_length, 2)
        _check_integer("batch_size", batch_size, 1)
        _check_integer("seed", seed, 0)
        _check_integer("max_bytes", max_bytes, 1, optional=True)
        _check_integer("max_validation_rows", max_validation_rows, 0, optional=True)
        _check_fractions(validation_fraction, held_out_fraction)
        if not isinstance(isolate, bool):
            raise UserError(f"data.isolate must be true or false, found {isolate!r}")
        if states not in (None, *DTYPES):
            raise UserError(f"data.states={states} is not one of null, {', '.join(DTYPES)}")
        self.source, self.row_length, self.batch_size, self.seed = source, row_length, batch_size, seed
        self.validation_fraction, self.held_out_fraction = validation_fraction, held_out_fraction
        self.max_bytes, self.max_validation_rows, self.cache_dir = max_bytes, max_validation_rows, cache_dir
        self.isolate, self.states, self.self_distilled = isolate, states, self_distilled
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._wanted: Wanted | None = None
        self._continue: ContinueText | None = None
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

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs in the training split's text. # [V]"""
        tokens = self._stream(self.documents("train")).tokens
        return torch.from_numpy(np.bincount(tokens, minlength=vocab_size))

    @property
    def needs_trunk(self) -> bool:
        """Whether the frozen trunk makes part of the data."""
        return self.states is not None or self.self_distilled is not None

    def attach_trunk(
        self, trunk: Trunk, fingerprint: str, taps: tuple[int, ...], continue_text: ContinueText
    ) -> None:
        """The frozen trunk: what `states` keeps of it, and how it writes for `self_distilled`."""
        self._wanted = Wanted(trunk, fingerprint, taps, self.states or "float32")
        self._continue = continue_text

    def prepare_data(self) -> None:
        """Write what takes long, in one process; the others find it on disk."""
        tell("documents: " + ", ".join(f"{len(self.documents(name))} {name}" for name in SPLITS))
        if self._wanted is None:
            return
        if self.trainer is not None:
            self._wanted.trunk.to(self.trainer.strategy.root_device)
        for rows in (self._training_rows(), self._validation_rows()):
            if rows is not None and self.states is not None:
                write_states(self._as_computed(self._wanted), rows, self.cache_dir)

    def train_dataloader(self) -> BatchStream:
        """Batches without end, the same for the same seed however often training is resumed."""
        rows = self._with_states(self._training_rows())
        rank, ranks = self._place()
        self._batches = BatchStream(rows, self.batch_size, self.seed, rank=rank, ranks=ranks)
        self._batches.step = self._start
        return self._batches

    def _place(self) -> tuple[int, int]:
        """This process and their number."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def val_dataloader(self) -> Sequence[Any] | DataLoader[Batch]:
        """The validation rows in a fixed order; nothing (and a note) when there are none."""
        rows = self._validation_rows()
        if rows is None:
            return []
        dataset: Any = Share(self._with_states(rows), *self._place())
        return DataLoader(dataset, batch_size=self.batch_size)

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return self._validation_rows() is not None

    def validation_prompts(self, count: int, prompt_tokens: int) -> list[list[int]]:
        """Token ids of the beginnings of validation documents, the same ones on every run."""
        assert self.tokenizer is not None
        found = prompts(self.documents("validation"), count, self.tokenizer, prompt_tokens)
        return [prompt.token_ids for prompt in found]

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
            splits["train"] = first_bytes(splits["train"], self.max_bytes)
        return splits

    def _training_rows(self) -> Rows:
        """The cache knows the documents in the order of hashes, whatever the seed; here they are shuffled."""
        stream = self._stream(self._training_documents())
        order = np.random.default_rng(self.seed).permutation(len(stream.lengths))
        return self._rows(stream.reordered(order))

    def _training_documents(self) -> list[Document]:
        documents = self.documents("train")
        if self.self_distilled is None:
            return documents
        if self._wanted is None or self._continue is None or self.tokenizer is None:
            raise RuntimeError("attach the trunk before asking for text that it writes")
        key = self._wanted.fingerprint
        return self.self_distilled.documents(
            documents, self.tokenizer, self._continue, key, cache_dir=self.cache_dir
        )

    def _validation_rows(self) -> Rows | None:
        if self.max_validation_rows == 0:
            return None
        if not self.documents("validation"):
            log.warning("no validation documents: validation is skipped")
            return None
        # In the order of hashes, not of names, so that the first rows are a fair sample of all.
        try:
            return self._rows(self._stream(self.documents("validation")), self.max_validation_rows)
        except UserError as error:
            log.warning("no validation target (%s): validation is skipped", error)
            return None

    def _stream(self, documents: list[Document]) -> Stream:
        if self.tokenizer is None:
            raise RuntimeError("attach a tokenizer before asking for a loader")
        return tokenize(sorted(documents, key=hashed), self.tokenizer, cache_dir=self.cache_dir)

    def _rows(self, stream: Stream, most: int | None = None) -> Rows:
        assert self.tokenizer is not None
        padding = self.tokenizer.pad_token_id or 0
        return Rows(stream, self.row_length, padding=padding, most=most, isolated=self.isolate)

    def _with_states(self, rows: Rows) -> Rows | WithStates:
        if self.states is None:
            return rows
        if self._wanted is None:
            raise RuntimeError("attach the trunk before asking for its states")
        wanted = self._as_computed(self._wanted)
        write_states(wanted, rows, self.cache_dir)  # nothing is left to do after prepare_data
        return with_states(wanted, rows, self.cache_dir)

    def _as_computed(self, wanted: Wanted) -> Wanted:
        """With the run's precision, so that the states are those that training would compute."""
        if self.trainer is None:
            return wanted
        precision = self.trainer.precision_plugin
        precision.convert_module(wanted.trunk)  # half precision throughout: Lightning would do it only later
        return replace(wanted, precision=self.trainer.precision, computing=precision.forward_context)


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
