"""Drafting with DeepSeek-V3's sequential modules, their own states rolled back with the text.

Shapes: B rows, W positions run at once, H hidden size.
"""

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.committed import Committed
from decoding.draft import Context, Draft, chain, no_draft
from decoding.drafters.parallel import drafting_room
from decoding.heads import need_head
from mtp import Network
from mtp.sequential import Sequential


class SequentialDrafter:
    """With n committed tokens and the root at position n, module k drafts token n+k from slot n-1.

    Slot j of module k holds what it made of state h^{k-1}_j and token j+k. That is final when token j+k is
    the root or older: j <= n-k. `propose` fills the k-1 slots above with drafted tokens; they are scratch.
    Every module is run on the same positions, from the first one that any module has not got final yet, so
    each module's input states come straight from the module before it, and what a verdict changed is computed
    anew.

    n = 7, three modules, module 3 final up to slot 4: all run on slots 5, 6 next time, after one more
    commitment.
    """

    def __init__(self, network: Network, head: Sequential):
        self.trunk, self.head = network.trunk, head
        self.taps = head.taps

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.streams = KVCache(
            batch_size, self.trunk.device
        )  # one layer a depth, all with the same final slots
        self.committed = Committed(batch_size)
        self.depths = 0  # streams that exist: fixed by the first draft, of which no text has been missed

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.committed.extend(tokens, states[self.trunk.num_layers], keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        self.depths = self.depths or num_draft_tokens
        count = min(num_draft_tokens, self.depths, max(context.room))
        if count <= 0 or not any(self.committed.lengths):
            return no_draft(root)
        tokens, laws = self._run(root, count, context)
        final = [max(length - self.depths + 1, 0) for length in self.committed.lengths]
        self.streams.lengths = [max(new, old) for new, old in zip(final, self.streams.lengths, strict=True)]
        return chain(tokens, laws, drafting_room(context.room, self.committed.lengths))

    def _run(self, root: Tensor, count: int, context: Context) -> tuple[list[Tensor], list[Tensor | None]]:
        """All modules over all open slots; tokens and laws of the first `count` depths."""
        line, hidden, counts = self.committed.since(self.streams.lengths)  # [B, W], [B, W, H]
        width = line.shape[1]
        window = self.streams.open(width)
        rotary = self.trunk.rotary(hidden, window.positions)
        rows = torch.arange(len(root), device=root.device)
        here = torch.tensor(counts, device=root.device)  # [B]: the root's place in the row's line
        line = torch.cat([line, line.new_zeros(len(line), self.depths + 1)], dim=1)
        line[rows, here] = root
        last = (here - 1).clamp(min=0)
        tokens: list[Tensor] = []
        laws: list[Tensor | None] = []
        for depth in range(1, self.depths + 1):
            module = self.head.stage(depth)
            fed = self.trunk.embed(line[:, depth : depth + width])
            hidden = module(hidden, fed, rotary, window.mask, self.streams.layer(depth - 1))
            if depth > count:
                continue  # its final slots must keep up with the others
            logits = self.trunk.lm_head(module.norm(hidden[rows, last]))
            law = context.law(
                logits, line[rows[:, None], here[:, None] + torch.arange(1, depth, device=root.device)]
            )
            token, q = context.draw(law, depth, depth)
            line[rows, here + depth] = token
            tokens.append(token)
            laws.append(q)
        return tokens, laws

    def select(self, rows: Tensor) -> None:
        self.streams.select(rows)
        self.committed.select(rows)


def build(network: Network) -> SequentialDrafter:
    return SequentialDrafter(network, need_head(network, "sequential"))
