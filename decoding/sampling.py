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

FIRST = 256  # of the likeliest tokens, so many at least are looked at first by top-p


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

    cold: Tensor  # [B, 1, 1] whether temperature is 0
    scales: dict[torch.dtype, Tensor]  # [B, 1, 1] what logits of a kind are divided by
    top_k: Tensor  # [B, 1, 1]; V where the filter is off
    top_p: Tensor  # [B, 1, 1]
    min_p: Tensor  # [B, 1, 1]
    largest_k: int  # 0: no row filters by rank
    any_top_p: bool
    any_min_p: bool
    any_greedy: bool
    all_greedy: bool

    @classmethod
    def stack(cls, rows: list[Sampling], vocab_size: int, device: torch.device) -> Self:
        column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)[:, None, None]  # noqa: E731
        ranks = [min(row.top_k, vocab_size) or vocab_size for row in rows]
        temperature = column([row.temperature for row in rows], torch.float64)
        cold = temperature == 0
        return cls(
            cold=cold,
            scales={
                dtype: torch.where(cold, 1.0, temperature)
                .clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max)
                .to(dtype)
                for dtype in (torch.float32, torch.float64)
            },
            top_k=column(ranks, torch.long),
            top_p=column([row.top_p for row in rows], torch.float64),
            min_p=column([row.min_p for row in rows], torch.float64),
            largest_k=max((rank for rank in ranks if rank < vocab_size), default=0),
            any_top_p=any(row.top_p < 1 for row in rows),
            any_min_p=any(row.min_p > 0 for row in rows),
            any_greedy=any(row.temperature == 0 for row in rows),
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
    scores = (logits - logits.amax(-1, keepdim=True)) / rows.scales[logits.dtype]
    if rows.largest_k:
        scores = keep_top_k(scores, rows)
    warm = scores.softmax(-1)
    if rows.any_top_p:
        warm = keep_top_p(warm, rows)
    if rows.any_min_p:
        warm = keep_min_p(warm, rows)
    return torch.where(rows.cold, greedy(logits), warm) if rows.any_greedy else warm


def greedy(logits: Tensor) -> Tensor:
    """One-hot at the best logit, the first of equals."""
    return torch.zeros_like(logits).scatter_(-1, best(logits)[..., None], 1.0)


def best(scores: Tensor) -> Tensor:
    """scores.argmax(-1) of [..., V], the first of equals. On a CPU numpy takes a tenth of torch's time, which
    for five nodes and a vocabulary of 49152 is a third of a millisecond."""
    if scores.is_cpu and scores.dtype in (torch.float32, torch.float64) and scores.dim() > 1:
        return torch.from_numpy(scores.numpy(force=True).argmax(-1))
    return scores.argmax(-1)


def keep_top_k(scores: Tensor, rows: RowSampling) -> Tensor:
    """-inf below the k-th largest score; ties with it stay, as in transformers."""
    best = scores.topk(rows.largest_k, dim=-1).values  # [B, N, K]
    rank = (rows.top_k - 1).clamp(max=rows.largest_k - 1).expand(*best.shape[:-1], 1)
    kth = best.gather(-1, rank)
    limited = rows.top_k < scores.shape[-1]
    return scores.masked_fill(limited & (scores < kth), -torch.inf)


def keep_top_p(probabilities: Tensor, rows: RowSampling) -> Tensor:
    """The smallest set of most probable tokens that holds mass top_p, renormalised; rows with top_p 1 are
    left alone. Of equally probable tokens the lower ids go first."""
    dropped = dropped_of_best(probabilities, rows) if probabilities.is_cpu else None
    if dropped is None:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        beyond = mass_before(ordered) >= rows.top_p
        beyond[..., 0] = False
        dropped = torch.zeros_like(beyond).scatter_(-1, order, beyond)
    kept = probabilities.masked_fill(dropped, 0.0)
    return torch.where(rows.top_p < 1, kept / kept.sum(-1, keepdim=True), probabilities)


def mass_before(ordered: Tensor) -> Tensor:
    """Mass of the more probable tokens, of probabilities in descending order."""
    return ordered.cumsum(-1, dtype=torch.float64) - ordered


def dropped_of_best(probabilities: Tensor, rows: RowSampling) -> Tensor | None:
    """What top-p drops, found among the K likeliest: to sort a whole vocabulary takes as long as a small
    network's step. None where more than K may be kept, or where ids have to decide between equals."""
    size = probabilities.shape[-1]
    most = min(max(FIRST, size // 16), size)
    likeliest = probabilities.topk(most, dim=-1).values  # [B, N, K] in descending order
    count = (mass_before(likeliest) < rows.top_p).sum(-1, keepdim=True).clamp(min=1)
    dropped = probabilities < likeliest.gather(-1, count - 1)
    unclear = (dropped.sum(-1, keepdim=True) + count != size) | (count == most)
    return None if bool((unclear & (rows.top_p < 1)).any()) else dropped


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
    # u is at most 1 - 2**-53, so that in float64 u * total is below the total, rounded or not.
    found = torch.searchsorted(mass, u[:, None] * mass[:, -1:], right=True)[:, 0]
    return found.clamp(max=law.shape[-1] - 1)  # a law of NaNs, from a network that overflowed, is beyond all
