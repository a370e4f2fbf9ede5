"""Targets, cross-entropies and agreement of what trunk and heads say about a row whose tokens are known.

Every number is a sum and a count, never a mean: they add up over micro-batches, processes and batches, and
nothing is divided before the end. All functions are pure.
Shapes: B rows, T tokens, N = B*T positions, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp.errors import UserError
from training.schedule import (
    CURRICULA,
    DROPOUT_SCHEDULES,
    dropout_rates,
    exit_scales,
    exit_weights,
    exits_enabled,
)

IGNORED = -100
LOGITS_AT_ONCE = 2**26  # entries of one [n, V] block of logits: 256 MB in float32


@dataclass(frozen=True, slots=True)
class Targets:
    """What one depth must predict at each position, and where there is such a target."""

    tokens: Tensor  # [B, T]; where not valid any id
    valid: Tensor  # [B, T] bool

    @property
    def count(self) -> Tensor:
        return self.valid.sum()

    @property
    def labels(self) -> Tensor:
        """[B, T] with IGNORED where there is no target."""
        return self.tokens.masked_fill(~self.valid, IGNORED)


def targets_at_depth(tokens: Tensor, documents: Tensor, depth: int, mask: Tensor | None = None) -> Targets:
    """What depth k must predict at position i of tokens [B, T]: token i+1+k, if it is in the same document.

    documents [B, T] number a row's documents, -1 is padding; mask [B, T] says which tokens may be targets.
    Documents lie in one piece, so equal numbers at both ends mean that no boundary is crossed.

    >>> tokens = torch.tensor([[10, 11, 12, 20, 21, 22, 0]])
    >>> documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    >>> targets_at_depth(tokens, documents, 0).labels.tolist()
    [[11, 12, -100, 21, 22, -100, -100]]
    >>> targets_at_depth(tokens, documents, 1).labels.tolist()
    [[12, -100, -100, 22, -100, -100, -100]]
    >>> targets_at_depth(tokens, documents, 1, mask=tokens < 20).labels.tolist()
    [[12, -100, -100, -100, -100, -100, -100]]
    """
    ahead = depth + 1
    valid = (documents >= 0) & (documents == shift(documents, ahead, -1))
    if mask is not None:
        valid &= shift(mask, ahead, False)
    return Targets(shift(tokens, ahead, 0), valid)


def shift(values: Tensor, ahead: int, fill: int | bool) -> Tensor:
    """Position i of the result [B, T] holds values[:, i + ahead], or `fill` beyond the row."""
    return F.pad(values[:, ahead:], (0, min(ahead, values.shape[1])), value=fill)


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of hidden @ weight.T, without keeping any logits for the backward pass.

    The gradients are made at once, block by block: memory holds one block of logits, however many the heads.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # [N, H], [V, H], [N]
        wanted = ctx.needs_input_grad[:2]
        total, of_hidden = hidden.new_zeros((), dtype=torch.float32), []
        of_weight = torch.zeros_like(weight) if wanted[1] else None
        for block, target in zip(*blocks(weight.shape[0], hidden, labels), strict=True):
            with torch.enable_grad():
                leaves = [block.detach().requires_grad_(wanted[0]), weight.detach().requires_grad_(wanted[1])]
                loss = cross_entropy_of_logits(F.linear(*leaves), target)
            grads = iter(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))
            if wanted[0]:
                of_hidden.append(next(grads))
            if of_weight is not None:
                of_weight += next(grads)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(of_hidden) if wanted[0] else None, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        scale = lambda x: None if x is None else x * grad.to(x.dtype)  # noqa: E731
        return scale(of_hidden), scale(of_weight), None


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over the labelled positions of -log softmax(hidden @ weight.T)[label]; exactly 0 without labels.

    hidden [B, T, H] after its norm, weight [V, H] the output matrix, labels [B, T]; the sum is float32.
    """
    flat, label = hidden.flatten(0, 1), labels.flatten()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return LinearCrossEntropy.apply(flat, weight, label)
    sums = [
        cross_entropy_of_logits(F.linear(h, weight), y)
        for h, y in zip(*blocks(len(weight), flat, label), strict=True)
    ]
    return torch.stack(sums).sum()


def cross_entropy_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def blocks(vocab_size: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each tensor [N, ...] cut along N so that one block of logits stays below LOGITS_AT_ONCE."""
    return [tensor.split(max(1, LOGITS_AT_ONCE // vocab_size)) for tensor in tensors]


@torch.no_grad()
def agreement(
    hidden: Tensor,
    trunk: Tensor,
    weight: Tensor,
    targets: Targets,
    depth: int,
    *,
    own: Tensor | None = None,
) -> Tensor:
    """[2]: sums over the targets of top-1 agreement with the trunk and of alpha = sum_v min(p_v, q_v).

    Both are about the same token: the head at depth k and position i against the trunk at position i+k.
    hidden and trunk [B, T, H] after their norms, weight [V, H]; `own` [V, H] where the head has a matrix of
    its own.
    """
    trunk = F.pad(trunk[:, depth:], (0, 0, 0, min(depth, trunk.shape[1])))
    flat = (hidden.flatten(0, 1), trunk.flatten(0, 1), targets.valid.flatten())
    total = torch.zeros(2, device=hidden.device)
    for of_head, of_trunk, valid in zip(*blocks(2 * len(weight), *flat), strict=True):
        p = F.linear(of_trunk, weight).float().softmax(-1)
        q = F.linear(of_head, weight if own is None else own).float().softmax(-1)
        same, overlap = p.argmax(-1) == q.argmax(-1), torch.minimum(p, q).sum(-1)
        total += torch.stack([(same & valid).sum(), (overlap * valid).sum()])
    return total


def feature_distance(hidden: Tensor, feature: Tensor, valid: Tensor) -> Tensor:
    """Sum over the valid [B, T] positions of SmoothL1 between two states [B, T, H], each its mean over H
    (EAGLE)."""
    distance = F.smooth_l1_loss(hidden.float(), feature.float(), reduction="none").mean(-1)
    return (distance * valid).sum()


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """How a head's D depths are weighted: `total` shared evenly (DeepSeek-V3's lambda/D), or `each`.

    `feature` weighs, beside that, how far each state is from the true one, for heads that foretell it.
    """

    total: float | None = None
    each: float | None = None
    feature: float = 0.0

    def __post_init__(self) -> None:
        if (self.total is None) == (self.each is None):
            raise UserError(
                f"loss: a head needs either total or each, found total={self.total}, each={self.each}"
            )

    def weights(self, depths: int) -> list[float]:
        """One weight for each depth.

        >>> HeadLoss(total=0.5).weights(2), HeadLoss(each=1.0).weights(2)
        ([0.25, 0.25], [1.0, 1.0])
        """
        return [self.total / depths if self.each is None else self.each] * depths  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Objective:
    """How the trunk is trained: the loss of its exits, its layer dropout, and which heads may not move it.

    With exits, LayerSkip's J = sum_l e~(t, l) CE(g(x_{l+1})) replaces the plain next-token loss, which is its
    last term.
    """

    e_scale: float
    curriculum: str
    rotation: int
    p_max: float
    dropout_schedule: str
    detach: tuple[str, ...] = ()  # heads whose gradient stops before the trunk's layers, norm and matrices

    def __post_init__(self) -> None:
        for key, allowed in (("curriculum", CURRICULA), ("dropout_schedule", DROPOUT_SCHEDULES)):
            if getattr(self, key) not in allowed:
                raise UserError(f"objective.{key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        if not 0 <= self.p_max <= 1:
            raise UserError(f"objective.p_max={self.p_max} is not between 0 and 1")
        if self.e_scale < 0:
            raise UserError(f"objective.e_scale={self.e_scale} is negative")
        if self.rotation < 1:
            raise UserError(f"objective.rotation={self.rotation} is not a whole number from 1 on")

    def layer_weights(self, num_layers: int, *, step: int, max_steps: int) -> list[float]:
        """e~(t, l) for l = 0..L-1; layer l is read after l+1 layers, the last one is the trunk itself."""
        enabled = exits_enabled(
            num_layers, self.curriculum, step=step, max_steps=max_steps, rotation=self.rotation
        )
        return exit_weights(exit_scales(num_layers, self.e_scale), enabled)

    def dropout(self, num_layers: int, *, step: int, max_steps: int) -> list[float]:
        return dropout_rates(
            num_layers, self.p_max, schedule=self.dropout_schedule, step=step, max_steps=max_steps
        )
