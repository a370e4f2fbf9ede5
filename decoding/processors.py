"""What changes logits before temperature and filters: penalties, bans, minimum length, a user's own
processors.

They are transformers' own logits processors, called for one prefix at a time, so every node of a draft is
judged with the text that leads to it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from decoding.sampling import Sampling
from mtp import UserError

Processor = Callable[[Tensor, Tensor], Tensor]  # ids [1, T], scores [1, V] -> scores [1, V]


def processors(
    sampling: Sampling,
    *,
    prompt_length: int,
    eos_token_ids: tuple[int, ...],
    tokenizer: Any,
    device: torch.device,
) -> list[Processor]:
    """The processors of one row in transformers' order, the user's own last; empty where nothing applies."""
    found: list[Processor] = []
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.bad_words:
        found.append(NoBadWordsLogitsProcessor(banned(sampling.bad_words, tokenizer), list(eos_token_ids)))
    if sampling.min_new_tokens and eos_token_ids:
        found.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_length, sampling.min_new_tokens, list(eos_token_ids), device=str(device)
            )
        )
    return [*found, *sampling.processors]


def banned(bad_words: tuple[str | tuple[int, ...], ...], tokenizer: Any) -> list[list[int]]:
    """Token sequences that must not come about: those given as ids, and a text's with and without a blank
    before."""
    sequences: list[list[int]] = []
    for word in bad_words:
        if isinstance(word, tuple):
            sequences.append(list(word))
            continue
        if tokenizer is None:
            raise UserError(f"bad_words: {word!r} is text, but this network has no tokenizer; give token ids")
        forms = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (word, " " + word)]
        sequences += [form for form in forms if form and form not in sequences]
    return sequences


def processed(logits: Tensor, prefixes: list[list[int]], rules: list[Processor]) -> Tensor:
    """logits [N, V], each row after its own prefix."""
    rows = []
    for scores, prefix in zip(logits, prefixes, strict=True):
        ids, scores = torch.tensor([prefix], device=logits.device), scores[None]
        for rule in rules:
            scores = rule(ids, scores)
        rows.append(scores)
    return torch.cat(rows)
