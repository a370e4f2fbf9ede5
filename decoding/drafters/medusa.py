"""Drafting with Medusa heads: every depth from the trunk's last committed state, nothing cached.

Shapes: B rows, W tokens given at once, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.branching import draw_tree
from decoding.cache import KVCache
from decoding.draft import Context, Draft, no_draft
from decoding.drafters.parallel import drafting_room
from decoding.heads import need_head
from decoding.shape import Shape, read_shape
from mtp import Network
from mtp.medusa import Medusa


class MedusaDrafter:
    """Head k at the last committed position i predicts token i+1+k; the root is token i+1.

    All it remembers is that position's state. What a head says does not depend on what the others drafted, so
    a tree costs no more than a chain.
    """

    def __init__(self, head: Medusa, shape: Shape):
        self.head, self.shape = head, shape
        self.taps = head.taps

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.state = torch.empty(batch_size, 0)  # [B, H] once something is committed
        self.known = [0] * batch_size  # 1: the row has a state

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        state = states[self.taps[0]]
        at = (keep * torch.arange(1, keep.shape[1] + 1)).amax(1)  # [B] behind the last kept token, 0: none
        rows = torch.arange(len(keep), device=state.device)
        last = state[rows, (at - 1).clamp(min=0).to(state.device)]
        kept = (at > 0).to(state.device)[:, None]
        self.state = torch.where(kept, last, self.state) if self.state.shape[1] else last
        self.known = [int(place > 0 or known) for place, known in zip(at.tolist(), self.known, strict=True)]

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, self.head.depth, max(context.room))
        if count <= 0 or not any(self.known):
            return no_draft(root)
        logits = [self.head.logits(depth, self.state) for depth in range(1, count + 1)]
        return draw_tree(logits, self.shape, context, drafting_room(context.room, self.known))

    def select(self, rows: Tensor) -> None:
        self.state = self.state[rows.to(self.state.device)]
        self.known = [self.known[row] for row in rows.tolist()]


def build(
    network: Network, widths: Sequence[int] | None = None, paths: Sequence[Sequence[int]] | None = None
) -> MedusaDrafter:
    """widths: children of every node at depth 0, 1, ...; paths: a sparse tree. Without either a chain."""
    shape = read_shape("medusa", network.trunk.vocab_size, widths, paths)
    return MedusaDrafter(need_head(network, "medusa"), shape)
