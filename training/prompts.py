"""Prompts for measuring: cut from documents that no split but the held-out one has seen."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mtp.errors import UserError
from training.split import split
from training.text import Document, Source, Stdlib

CHARACTERS = 16  # read for each token wanted at first; twice as many, and so on, when they do not suffice
TRIES = 8  # line starts tried in one document before it is given up


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of something in a held-out document."""

    document: str  # the document's name
    text: str  # what the ids say, special tokens left out
    token_ids: list[int]  # begins with the tokenizer's own begin token, if it puts one


def held_out_documents(
    source: Source | None = None,
    *,
    validation_fraction: float = 0.02,
    held_out_fraction: float = 0.03,
    cache_dir: str | None = None,
) -> list[Document]:
    """The documents set aside for measuring, of the standard library when no source is named."""
    source = source or Stdlib()
    if source.validation_documents() is not None:
        validation_fraction = 0.0
    return split(source.documents(), validation_fraction, held_out_fraction, cache_dir=cache_dir)["held_out"]


def prompts(
    documents: Sequence[Document],
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int = 64,
    seed: int = 0,
) -> list[Prompt]:
    """`count` prompts of exactly `prompt_tokens` tokens, each from the start of a line.

    Every document gives one before any gives a second. The choice depends on names, texts and the seed alone,
    and the first prompts of a larger count are those of a smaller one.
    """
    ordered = sorted(documents, key=lambda document: _hash(seed, document.name))
    found: list[Prompt] = []
    used: set[tuple[str, int]] = set()
    for turn in range(count):
        before = len(found)
        for document in ordered:
            if len(found) == count:
                return found
            starts = _line_starts(document, seed, turn)
            fresh = (start for start in starts if (document.name, start) not in used)
            for start in fresh:
                token_ids = _token_ids(document.text[start:], tokenizer, prompt_tokens)
                if token_ids:
                    used.add((document.name, start))
                    text = tokenizer.decode(token_ids, skip_special_tokens=True)
                    found.append(Prompt(document.name, text, token_ids))
                    break
        if len(found) == before:
            break
    if len(found) < count:
        raise UserError(
            f"{len(documents)} held-out documents give {len(found)} prompts of {prompt_tokens} tokens, "
            f"{count} are wanted"
        )
    return found


def _line_starts(document: Document, seed: int, turn: int) -> Iterator[int]:
    """Some places where a line begins that is not blank, drawn by hash."""
    lines = document.text.split("\n")
    starts, place = [], 0
    for line in lines:
        if line.strip():
            starts.append(place)
        place += len(line) + 1
    if not starts:
        return
    for attempt in range(TRIES):
        yield starts[_hash(seed, document.name, turn, attempt) % len(starts)]
    yield starts[0]  # the longest text of all


def _token_ids(text: str, tokenizer: PreTrainedTokenizerBase, wanted: int) -> list[int] | None:
    """The first `wanted` ids of the text, or None when it has fewer; only as much is read as needed."""
    size = wanted * CHARACTERS
    while True:
        token_ids = tokenizer(text[:size])["input_ids"]
        if len(token_ids) > wanted or size >= len(text):  # one more, so that the last is not cut by the slice
            return list(token_ids[:wanted]) if len(token_ids) >= wanted else None
        size *= 2


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")
