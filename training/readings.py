"""A head's states read through an output matrix: losses, their gradients, and acceptance, block by block.

At no time do the logits of more than one block of positions exist, whatever a batch holds and however many
heads there are: a block's gradient goes into the states and into the matrix before the next is formed.
Shapes: B rows, T tokens, N = B*T positions, n of one block, H hidden size, V vocabulary, R tokens that may be
drafted (V unless the head has a draft vocabulary), Q quantities of one kind of loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from training.distances import forward_kl, hybrid, log_alpha, ratio, reverse_kl, total_variation
from training.targets import IGNORED, Targets, shift

LOGITS_AT_ONCE = 2**26  # entries of one [n, V] block of logits: 256 MB in float32
ON_CPU = 2**19  # there a block that stays in the cache is faster: 2 MB
ROWS_AT_ONCE = 256  # but with fewer positions reading the matrix costs more than that gains
COUPLED = ("tv_chain", "accept")  # kinds whose formula needs all depths of a draft
KINDS = ("ce", "kl", "reverse_kl", "tv", "lk", "hybrid", *COUPLED)


@dataclass(frozen=True, slots=True)
class Reading:
    """One readout with all that its losses compare it with."""

    hidden: Tensor  # [B, T, H] after the norm that goes before the output matrix
    matrix: Tensor  # [V, H]
    targets: Targets
    law: Tensor  # [B, T, H] the trunk's final state that says p of the same token; a constant
    law_matrix: Tensor  # [V, H] a constant
    ids: Tensor | None = None  # [R] ascending; None: all V
    normaliser: Tensor | None = None  # [B, T] of the law, see `normalisers`; None: found when it is needed

    @property
    def labels(self) -> Tensor:
        """[B, T] places of the targets among the R tokens, IGNORED where there is none."""
        labels = self.targets.labels
        if self.ids is None:
            return labels
        place = torch.searchsorted(self.ids, labels.contiguous()).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[place] == labels, place, IGNORED)

    def rows(self, matrix: Tensor) -> Tensor:
        """[R, H]: the matrix's rows of the tokens that may be drafted."""
        return matrix if self.ids is None else matrix[self.ids]


@dataclass(frozen=True, slots=True)
class Block:
    """Some positions of a reading."""

    logits: Tensor  # [n, R]
    label: Tensor  # [n] place among the R tokens or IGNORED
    law: Tensor  # [n, H]
    normaliser: Tensor | None  # [n]
    rows: Tensor  # [R, H] of the law's matrix
    reading: Reading

    def trunk_logits(self) -> Tensor:
        """[n, V]"""
        return widened(F.linear(self.law, self.reading.law_matrix)).detach()

    def log_laws(self) -> tuple[Tensor, Tensor]:
        """log p and log q, both [n, R], p as it is within the whole vocabulary."""
        logits = widened(F.linear(self.law, self.rows)).detach()
        if self.reading.ids is None:
            log_p = logits.log_softmax(-1)
        else:
            whole = self.trunk_logits().logsumexp(-1) if self.normaliser is None else self.normaliser
            log_p = logits - whole[:, None]
        return log_p, widened(self.logits).log_softmax(-1)


def law_at_depth(trunk: Tensor, depth: int) -> Tensor:
    """The trunk's final states [B, T, H] moved so that position i has what depth k there is compared with.

    Depth k at position i is about token i+1+k, which the trunk predicts at position i+k.
    """
    return shift(trunk, depth, 0)


def blocks(reading: Reading, matrix: Tensor, hidden: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """The reading in blocks, each with the part [n, H] of `hidden` [N, H] that its logits are made of."""
    label, law = reading.labels.flatten(), reading.law.flatten(0, 1)
    normaliser = None if reading.normaliser is None else reading.normaliser.flatten()
    reading = replace(reading, law_matrix=lowered(reading.law_matrix))
    matrix, rows = matrix if matrix.requires_grad else lowered(matrix), reading.rows(reading.law_matrix)
    size = at_once(reading.law_matrix)
    for first in range(0, len(hidden), size):
        some = slice(first, first + size)
        part = hidden[some].detach().requires_grad_(hidden.requires_grad)
        whole = None if normaliser is None else normaliser[some]
        yield Block(F.linear(part, matrix), label[some], law[some], whole, rows, reading), part


def at_once(matrix: Tensor) -> int:
    """Positions of one block, with a matrix [V, H]."""
    most = max(1, LOGITS_AT_ONCE // len(matrix))
    return most if matrix.is_cuda else min(most, max(ROWS_AT_ONCE, ON_CPU // len(matrix)))


@torch.no_grad()
def normalisers(state: Tensor, matrix: Tensor) -> Tensor:
    """log of the sum of e^logit over the vocabulary for states [B, T, H]: [B, T].

    Where a head drafts from few tokens this is all that the others have to say, and the same for all depths.
    """
    matrix = lowered(matrix.detach())
    parts = state.flatten(0, 1).split(at_once(matrix))
    found = [widened(F.linear(part, matrix)).logsumexp(-1) for part in parts]
    return torch.cat(found).view(state.shape[:2])


def quantities(kind: str, block: Block, eta: float) -> Tensor:
    """[Q, n] what a kind of loss is made of, position by position; without a target any finite number.

    `tv_chain` is made of alpha, `accept` of alpha and the chance that the text's token is accepted; of every
    other kind it is the loss itself.
    """
    if kind == "ce":
        logits = widened(block.logits)
        return F.cross_entropy(logits, block.label, ignore_index=IGNORED, reduction="none")[None]
    log_p, log_q = block.log_laws()
    match kind:
        case "kl":
            value = forward_kl(log_p, log_q)
        case "reverse_kl":
            value = reverse_kl(log_p, log_q)
        case "tv":
            value = total_variation(log_p, log_q)
        case "lk":
            value = -log_alpha(log_p, log_q)
        case "hybrid":
            value = hybrid(log_p, log_q, eta)
        case "tv_chain":
            value = log_alpha(log_p, log_q).exp()
        case _:
            return torch.stack([log_alpha(log_p, log_q).exp(), accepted(block.label, log_p, log_q)])
    return value[None]


def accepted(label: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """min(1, q(x) / p(x)) of the text's token x = label [n]: [n]; 0 where the head cannot draft it."""
    at = label.clamp(min=0)[:, None]
    chance = ratio(log_p.gather(1, at)[:, 0], log_q.gather(1, at)[:, 0])
    return torch.where(label == IGNORED, 0.0, chance)


@torch.no_grad()
def read(reading: Reading, kind: str, eta: float = 3.0) -> Tensor:
    """The quantities at every position: [Q, N]."""
    matrix, hidden = reading.rows(reading.matrix).detach(), reading.hidden.detach().flatten(0, 1)
    return torch.cat([quantities(kind, block, eta) for block, _ in blocks(reading, matrix, hidden)], dim=1)


def gradient(reading: Reading, kind: str, coefficients: Tensor, eta: float = 3.0) -> Tensor:
    """Gradient of sum(coefficients * quantities) in `hidden`: [B, T, H]; that in the matrix goes to its
    `.grad`.

    coefficients [Q, N] are constants. The graph behind `hidden` is left alone.
    """
    matrix, hidden = reading.rows(reading.matrix), reading.hidden.detach().flatten(0, 1).requires_grad_()
    kept = matrix if reading.ids is None else matrix.detach().requires_grad_(matrix.requires_grad)
    found, first = [], 0
    for block, part in blocks(reading, kept, hidden):
        coefficient = coefficients[:, first : first + len(part)]
        (coefficient * quantities(kind, block, eta)).sum().backward()
        assert part.grad is not None
        found.append(part.grad)
        first += len(part)
    if kept is not matrix and kept.grad is not None:
        matrix.backward(kept.grad)
    return torch.cat(found).view_as(reading.hidden)


@torch.no_grad()
def measured(reading: Reading) -> Tensor:
    """[4]: sums over the targets of cross-entropy, 1, top-1 agreement with the trunk, alpha; in float64.

    A target outside of the head's draft vocabulary costs nothing here, and agrees with nothing.
    """
    total, first = torch.zeros(4, dtype=torch.float64, device=reading.hidden.device), 0
    matrix, hidden = reading.rows(reading.matrix).detach(), reading.hidden.detach().flatten(0, 1)
    valid = reading.targets.valid.flatten()
    for block, part in blocks(reading, matrix, hidden):
        some = valid[first : first + len(part)]
        log_p, log_q = block.log_laws()
        best = (log_p if reading.ids is None else block.trunk_logits()).argmax(-1)
        said = log_q.argmax(-1) if reading.ids is None else reading.ids[log_q.argmax(-1)]
        loss, overlap = quantities("ce", block, 0.0)[0], log_alpha(log_p, log_q).exp()
        total += torch.stack([(value * some).sum().double() for value in (loss, some, said == best, overlap)])
        first += len(part)
    return total


def feature_gradient(hidden: Tensor, feature: Tensor, valid: Tensor) -> Tensor:
    """Gradient in hidden [B, T, H] of the sum over valid [B, T] of SmoothL1 between two states, each its mean
    over H (EAGLE)."""
    leaf = hidden.detach().requires_grad_()
    feature_distance(leaf, feature, valid).backward()
    assert leaf.grad is not None
    return leaf.grad


def feature_distance(hidden: Tensor, feature: Tensor, valid: Tensor) -> Tensor:
    """Sum over the valid [B, T] positions of SmoothL1 between two states [B, T, H], each its mean over H
    (EAGLE)."""
    distance = F.smooth_l1_loss(widened(hidden), widened(feature), reduction="none").mean(-1)
    return (distance * valid).sum()


def lowered(matrix: Tensor) -> Tensor:
    """A constant matrix as autocast would make it before every product: once instead."""
    kind = matrix.device.type
    return matrix.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else matrix


def widened(values: Tensor) -> Tensor:
    """Losses and laws are float32 or wider."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
