"""Documents -> one stream of tokens -> rows that know which document each token belongs to.

Letters: N tokens of the stream, D documents, T tokens a row.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mtp.errors import UserError
from training import chat
from training.cache import cached, digest
from training.progress import shown
from training.text import Document

PADDING = -1  # the document of a position that holds none
PIECE = 1 << 20  # characters: a longer document is tokenised in pieces, or one line of 30 MB would cost 30 GB
BATCH = 1 << 21  # characters tokenised in one call
LONG_WORK = 1 << 22  # characters from which it is shown how far the work is


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents one after the other, each as begin, text, end (as far as the tokenizer has such tokens)."""

    tokens: np.ndarray  # [N] int32
    lengths: np.ndarray  # [D] int64
    learned: np.ndarray | None = None  # [N] bool, which tokens may be targets; None: all

    def reordered(self, order: Sequence[int] | np.ndarray) -> "Stream":
        """The same documents in another order."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths

        def moved(values: np.ndarray) -> np.ndarray:
            parts = [values[starts[number] : ends[number]] for number in order]
            return np.concatenate([np.empty(0, values.dtype), *parts])

        learned = None if self.learned is None else moved(self.learned)
        return Stream(moved(self.tokens), self.lengths[np.asarray(order, np.int64)], learned)


class Rows:
    """A stream cut into rows of T tokens; a map-style dataset.

    The last row is padded; one left over with a single token, which has no target, is dropped. `most` keeps
    the first so many rows only. `isolated` says that documents of one row are not to see each other.

    Example, T = 4, two documents of 3 and 4 tokens: tokens a b c d | e f g ·, documents 0 0 0 1 | 1 1 1 −1.
    """

    def __init__(
        self,
        stream: Stream,
        row_length: int,
        *,
        padding: int = 0,
        most: int | None = None,
        isolated: bool = False,
    ):
        self.stream, self.row_length, self.padding, self.isolated = stream, row_length, padding, isolated
        self.ends = np.cumsum(stream.lengths)  # [D]
        total = len(stream.tokens)
        self.count = total // row_length + (total % row_length >= 2)
        if most is not None:
            self.count = min(self.count, most)
        if not self.trainable():
            raise UserError(self._why_not(total))

    @property
    def key(self) -> str:
        """A hash of all that the trunk would see of the rows."""
        parts = "|".join(map(str, (self.row_length, self.count, self.padding))).encode()
        borders = self.ends.tobytes() if self.isolated else b""
        return hashlib.sha256(parts + borders + self.stream.tokens.tobytes()).hexdigest()

    def _why_not(self, total: int) -> str:
        if self.stream.learned is None:
            return f"found {total} tokens in {len(self.ends)} documents; one document of at least 2 is needed"
        count = int(self.stream.learned.sum())
        return (
            f"found {total} tokens in {len(self.ends)} documents, {count} of them to be learned; "
            "at least one must follow another token (of a conversation the assistant's turns are learned)"
        )

    def trainable(self, depth: int = 0) -> int:
        """How many targets depth k has: tokens with k+1 before them in their own document and row.

        Example, T = 4, documents of 3 and 4 tokens in the rows a b c d | e f g: depth 0 has b c and f g,
        depth 1 has c and g, depth 2 none (d e f g is a document, but cut).
        """
        places = np.arange(min(len(self.stream.tokens), self.count * self.row_length))
        starts = np.repeat(self.ends - self.stream.lengths, self.stream.lengths)[: len(places)]
        found = np.minimum(places - starts, places % self.row_length) > depth
        if self.stream.learned is not None:
            found &= self.stream.learned[: len(places)]
        return int(found.sum())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """`tokens` [T] and `documents` [T], both int64; `mask` [T] bool where not every token is learned;
        `isolated`, a single True, where documents do not see each other."""
        if not 0 <= row < self.count:
            raise IndexError(row)
        start = row * self.row_length
        stop = min(start + self.row_length, len(self.stream.tokens))
        tokens = np.full(self.row_length, self.padding, np.int64)
        documents = np.full(self.row_length, PADDING, np.int64)
        tokens[: stop - start] = self.stream.tokens[start:stop]
        documents[: stop - start] = np.searchsorted(self.ends, np.arange(start, stop), side="right")
        found = {"tokens": torch.from_numpy(tokens), "documents": torch.from_numpy(documents)}
        if self.stream.learned is not None:
            mask = np.zeros(self.row_length, bool)
            mask[: stop - start] = self.stream.learned[start:stop]
            found["mask"] = torch.from_numpy(mask)
        if self.isolated:
            found["isolated"] = torch.tensor(True)
        return found


def tokenize(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, cache_dir: str | None = None
) -> Stream:
    """The stream of these documents in their order; from the cache if the same was asked for before."""
    if any(document.messages is not None or document.token_ids is not None for document in documents):
        return _learned_in_part(documents, tokenizer)
    backend = _plain(tokenizer)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = [document.text for document in documents]

    def compute() -> dict[str, np.ndarray]:
        encoded = [np.array([*begin, *ids, *end], np.int32) for ids in _encode(texts, backend)]
        tokens = np.concatenate([np.empty(0, np.int32), *encoded])
        small = np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32  # half the space on disk
        return {"tokens": tokens.astype(small), "lengths": np.array([len(ids) for ids in encoded], np.int64)}

    key = digest("stream", tokenizers.__version__, backend.to_str(), json.dumps([begin, end]), *texts)
    stored = cached(cache_dir, key, compute)
    return Stream(stored["tokens"].astype(np.int32), stored["lengths"])


def _learned_in_part(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> Stream:
    """Conversations as the tokenizer's chat template has them, tokens as they are, texts as ever."""
    plain = [document for document in documents if document.messages is None and document.token_ids is None]
    texts = tokenize(plain, tokenizer) if plain else Stream(np.empty(0, np.int32), np.empty(0, np.int64))
    of_texts = iter(np.split(texts.tokens, np.cumsum(texts.lengths)[:-1]))
    encoded = []
    for document in documents:
        if document.messages is not None:
            encoded.append(chat.encode(document.messages, tokenizer, document.name))
        elif document.token_ids is not None:
            ids = np.array(document.token_ids, np.int32)
            encoded.append((ids, np.arange(len(ids)) >= document.learn_from))
        else:
            ids = next(of_texts)
            encoded.append((ids, np.ones(len(ids), bool)))
    tokens, learned = (np.concatenate([part[i] for part in encoded]) for i in (0, 1))
    return Stream(tokens.astype(np.int32), np.array([len(ids) for ids, _ in encoded], np.int64), learned)


def _plain(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Its rules without truncation and padding, and deaf to special tokens spelt out in a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UserError(
            f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json form; a fast one is needed"
        )
    backend = Tokenizer.from_str(backend.to_str())  # a copy: the caller's keeps its settings
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _encode(texts: Sequence[str], backend: Tokenizer) -> Iterator[list[int]]:
    """Token ids of every text, nothing added."""
    pieces = [(number, piece) for number, text in enumerate(texts) for piece in _pieces(text)]
    ids: list[int] = []
    current = 0
    for batch in _with_progress(list(_batches(pieces)), sum(map(len, texts))):
        encodings = backend.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
        for (number, _), encoding in zip(batch, encodings, strict=True):
            if number != current:
                yield ids
                ids, current = [], number
            ids = ids + encoding.ids if ids else encoding.ids
    if texts:
        yield ids


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most PIECE characters, cut before a line or a space where there is one."""
    start = 0
    while len(text) - start > PIECE:
        stop = start + PIECE
        cut = max(text.rfind("\n", start + PIECE // 2, stop) + 1, text.rfind(" ", start + PIECE // 2, stop))
        stop = cut if cut > start else stop
        yield text[start:stop]
        start = stop
    yield text[start:]


def _batches(pieces: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _with_progress(batches: list[Any], characters: int) -> Iterable[Any]:
    if characters < LONG_WORK:
        return batches
    return shown(batches, "tokenising")
