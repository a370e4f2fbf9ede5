"""From logits to the law that a token is drawn from, and the draw itself.

Shapes: B rows, N nodes, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mtp.errors import UserError, check_whole


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row samples: temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch these filters off.

    The order is transformers': repetition penalty, bad words, minimum length, the user's own processors (each
    ids [1, T], scores [1, V] -> scores), then temperature, top-k, top-p, min-p. bad_words are texts or tuples
    of token ids; min_new_tokens holds an EOS back.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, low=0.0)
        check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        check_number("min_p", self.min_p, low=0.0, high=1.0)
        check_number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        check_whole("top_k", self.top_k, 0)
        check_whole("min_new_tokens", self.min_new_tokens, 0)
        for word in self.bad_words:
            if not isinstance(word, (str, tuple)) or not word:
                raise UserError(f"bad_words: {word!r} is not a text of at least one character")


def check_number(
    name: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """UserError unless value is a finite number from low (excluded if open_low) to high."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        start = "above" if open_low else "of at least"
        end = f" and at most {high:g}" if high < math.inf else ""
        raise UserError(f"{name}={value} is not a finite number {start} {low:g}{end}")


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The settings of all rows as tensors, ready for [B, N, V]."""

    temperature: Tensor  # [B, 1, 1]
    top_k: Tensor  # [B, 1, 1]; V where the filter is off
    top_p: Tensor  # [B, 1, 1]
    min_p: Tensor  # [B, 1, 1]
    largest_k: int  # 0: no row filters by rank
    any_top_p: bool
    any_min_p: bool
    all_greedy: bool

    @classmethod
    def stack(cls, rows: list[Sampling], vocab_size: int, device: torch.device) -> Self:
        column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)[:, None, None]  # noqa: E731
        ranks = [min(row.top_k, vocab_size) or vocab_size for row in rows]
        return cls(
            temperature=column([row.temperature for row in rows], torch.float64),
            top_k=column(ranks, torch.long),
            top_p=column([row.top_p for row in rows], torch.float64),
            min_p=column([row.min_p for row in rows], torch.float64),
            largest_k=max((rank for rank in ranks if rank < vocab_size), default=0),
            any_top_p=any(row.top_p < 1 for row in rows),
            any_min_p=any(row.min_p > 0 for row in rows),
            all_greedy=all(row.temperature == 0 for row in rows),
        )


def law(logits: Tensor, rows: RowSampling) -> Tensor:
    """Logits [B, N, V] -> law [B, N, V] in float32 or wider; a row with temperature 0 gets one-hot laws.

    Greedy takes the lowest id among equal best logits. The maximum is subtracted before dividing, so that any
    positive temperature is finite.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if rows.all_greedy:
        return greedy(logits)
    cold = rows.temperature == 0
    number = torch.finfo(logits.dtype)
    scale = torch.where(cold, 1.0, rows.temperature).clamp(number.tiny, number.max).to(logits.dtype)
    scores = (logits - logits.amax(-1, keepdim=True)) / scale
    if rows.largest_k:
        scores = keep_top_k(scores, rows)
    warm = scores.softmax(-1)
    if rows.any_top_p:
        warm = keep_top_p(warm, rows)
    if rows.any_min_p:
        warm = keep_min_p(warm, rows)
    return torch.where(cold, greedy(logits), warm) if bool(cold.any()) else warm


def greedy(logits: Tensor) -> Tensor:
    """One-hot at the best logit, the first of equals."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def keep_top_k(scores: Tensor, rows: RowSampling) -> Tensor:
    """-inf below the k-th largest score; ties with it stay, as in transformers."""
    best = scores.topk(rows.largest_k, dim=-1).values  # [B, N, K]
    rank = (rows.top_k - 1).clamp(max=rows.largest_k - 1).expand(*best.shape[:-1], 1)
    kth = best.gather(-1, rank)
    limited = rows.top_k < scores.shape[-1]
    return scores.masked_fill(limited & (scores < kth), -torch.inf)


def keep_top_p(probabilities: Tensor, rows: RowSampling) -> Tensor:
    """The smallest set of most probable tokens that holds mass top_p, renormalised; rows with top_p 1 are
    left alone."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered  # mass of the more probable tokens
    dropped = (before >= rows.top_p) & (rows.top_p < 1)
    dropped[..., 0] = False
    kept = probabilities.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), 0.0)
    return torch.where(rows.top_p < 1, kept / kept.sum(-1, keepdim=True), probabilities)


def keep_min_p(probabilities: Tensor, rows: RowSampling) -> Tensor:
    """Only tokens with at least min_p times the best one's probability, renormalised; min_p 0 keeps all."""
    least = rows.min_p.to(probabilities.dtype) * probabilities.amax(-1, keepdim=True)
    kept = probabilities.masked_fill(probabilities < least, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def draw(law: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulated law [B, V] first exceeds u [B] in [0, 1): one draw a row.

    A token of probability zero adds nothing to the sum and is never drawn. The law need not sum to one
    exactly.

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([0.5]))
    tensor([2])
    """
    mass = law.cumsum(-1, dtype=torch.float64)  # [B, V]
    total = mass[:, -1:]
    at = torch.minimum(u[:, None] * total, total.nextafter(torch.zeros_like(total)))
    found = torch.searchsorted(mass, at, right=True)[:, 0]
    return found.clamp(max=law.shape[-1] - 1)  # a law of NaNs, from a network that overflowed, is beyond all
