"""What each depth must predict at each position of a row, and where there is such a target.

Shapes: B rows, T tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100

# tokens [B, T], documents [B, T], mask [B, T] where not every token is a target, isolated [B] where documents
# do not see each other, state_<tap> [B, T, H] where the frozen trunk has been run before
Batch = dict[str, Tensor]


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


def targets_by_depth(batch: Batch, depths: Iterable[int]) -> dict[int, Targets]:
    mask = batch.get("mask")
    return {
        depth: targets_at_depth(batch["tokens"], batch["documents"], depth, mask)
        for depth in sorted(set(depths))
    }


def may_see(batch: Batch) -> Tensor | None:
    """[B, 1, T, T] bool, True where position i may look at position j: at what is not behind it of its own
    document, where a batch has its documents isolated. Otherwise None: at all that is not behind it.

    >>> rows = {"documents": torch.tensor([[0, 0, 1, -1]]), "isolated": torch.tensor([True])}
    >>> may_see(rows)[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    if "isolated" not in batch:
        return None
    documents = batch["documents"]
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def shift(values: Tensor, ahead: int, fill: int | bool) -> Tensor:
    """Position i of the result [B, T, ...] holds values[:, i + ahead], or `fill` beyond the row."""
    missing = min(ahead, values.shape[1])
    return F.pad(values[:, ahead:], (0, 0) * (values.ndim - 2) + (0, missing), value=fill)
