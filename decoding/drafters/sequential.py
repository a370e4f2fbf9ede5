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
    All modules of a draft run on the same slots, from the first that one of them has not got final: each
    module's input states come straight from the module before it, and what a verdict changed is computed
    anew. A module that is not asked for lags behind and catches up when it is.

    Three modules ran with n = 7: modules 1, 2, 3 are final up to slots 6, 5, 4. One more token is committed,
    n = 8:
    all three run on slots 5, 6, 7.
    """

    def __init__(self, network: Network, head: Sequential):
        self.trunk, self.head = network.trunk, head
        self.taps = head.taps

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.streams = KVCache(batch_size, self.trunk.device)  # one layer a depth
        self.committed = Committed(batch_size)
        self.final: list[list[int]] = []  # by depth and row: slots that are final

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.committed.extend(tokens, states[self.trunk.num_layers], keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, max(context.room))
        if count <= 0 or not any(self.committed.lengths):
            return no_draft(root)
        self.final += [[0] * len(root) for _ in range(count - len(self.final))]
        self.streams.lengths = [min(slots) for slots in zip(*self.final[:count], strict=True)]
        tokens, laws = self._run(root, count, context)
        for depth in range(1, count + 1):
            self.final[depth - 1] = [max(length - depth + 1, 0) for length in self.committed.lengths]
        return chain(tokens, laws, drafting_room(context.room, self.committed.lengths))

    def _run(self, root: Tensor, count: int, context: Context) -> tuple[list[Tensor], list[Tensor | None]]:
        """Modules 1 ... count over all open slots; the tokens they draft and the laws behind them."""
        line, hidden, counts = self.committed.since(self.streams.lengths)  # [B, W], [B, W, H]
        width = line.shape[1]
        window = self.streams.open(width)
        rotary = self.trunk.rotary(hidden, window.positions)
        rows = torch.arange(len(root), device=root.device)
        here = torch.tensor(counts, device=root.device)  # [B]: the root's place in the row's line
        line = torch.cat([line, line.new_zeros(len(line), count + 1)], dim=1)
        line[rows, here] = root
        last = (here - 1).clamp(min=0)
        tokens: list[Tensor] = []
        laws: list[Tensor | None] = []
        for depth in range(1, count + 1):
            module = self.head.stage(depth)
            fed = self.trunk.embed(line[:, depth : depth + width])
            hidden = module(hidden, fed, rotary, window.mask, self.streams.layer(depth - 1))
            logits = self.trunk.lm_head(module.norm(hidden[rows, last]))
            law = context.law(logits, torch.stack(tokens, 1) if tokens else line[:, :0])
            token, q = context.draw(law, depth, depth)
            line[rows, here + depth] = token
            tokens.append(token)
            laws.append(q)
        return tokens, laws

    def select(self, rows: Tensor) -> None:
        self.streams.select(rows)
        self.committed.select(rows)
        self.final = [[slots[row] for row in rows.tolist()] for slots in self.final]


def build(network: Network) -> SequentialDrafter:
    return SequentialDrafter(network, need_head(network, "sequential"))
