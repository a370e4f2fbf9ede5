"""Drafting with EAGLE's head: the trunk's states foretold, one position after the other.

Shapes: B rows, W positions run at once, K nodes of one depth, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.committed import Committed
from decoding.draft import Context, Draft, no_draft
from decoding.drafters.parallel import drafting_room
from decoding.growth import Growth, read_growth
from decoding.heads import need_head
from mtp import Network
from mtp.eagle import Eagle


class EagleDrafter:
    """With n committed tokens and the root at position n, slot j of its cache has token j+1 and feature f_j.

    Slots up to n-1, the root's, are of true tokens and the trunk's features, and final. A drafted node lies
    above them with a foretold feature; whatever the verdict, that is not the trunk's, so all such slots are
    dropped, and those of accepted tokens are computed from true features when it drafts again.
    """

    def __init__(self, network: Network, head: Eagle, growth: Growth):
        self.trunk, self.head, self.growth = network.trunk, head, growth
        self.taps = head.taps

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.cache = KVCache(batch_size, self.trunk.device)
        self.committed = Committed(batch_size)
        self.final = [0] * batch_size  # slots that are final

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.committed.extend(tokens, states[self.taps[0]], keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, max(context.room))
        if count <= 0 or not any(self.committed.lengths):
            return no_draft(root)
        tree = self.growth.begin(root, context)
        feature = self._caught_up(root)
        parents = torch.empty(len(root), 0, dtype=torch.long)  # [B, N] of the nodes that were run
        for depth in range(1, count + 1):
            level = tree.expand(self.head.logits(self.trunk, feature))
            if depth == count:
                break
            start = parents.shape[1] - feature.shape[1] + 1  # number of the level before's first node
            parents = torch.cat([parents, level.above.cpu() + start], dim=1)
            above = level.above.to(feature.device)[..., None].expand(-1, -1, feature.shape[2])
            feature = self._run(level.tokens, feature.gather(1, above), parents)
        return tree.draft(drafting_room(context.room, self.committed.lengths))

    def _caught_up(self, root: Tensor) -> Tensor:
        """Run the slots from the first that is not final up to the root's; the feature foretold there
        [B, 1, H].

        Afterwards the root's slot is node 0 of the scratch, as it is in the trunk's cache.
        """
        self.cache.lengths = list(self.final)
        line, features, counts = self.committed.since(self.final)  # [B, W], [B, W, H]
        rows, here = torch.arange(len(root), device=root.device), torch.tensor(counts, device=root.device)
        line = torch.cat([line, line[:, :1]], dim=1)
        line[rows, here] = root
        window = self.cache.open(features.shape[1])
        rotary = self.trunk.rotary(features, window.positions)
        embedded = self.trunk.embed(line[:, 1:])
        foretold = self.head(embedded, features, rotary, window.mask, self.cache)
        self.final = list(self.committed.lengths)
        self.cache.lengths = [max(length - 1, 0) for length in self.final]
        return foretold[rows, (here - 1).clamp(min=0)][:, None]

    def _run(self, tokens: Tensor, feature: Tensor, parents: Tensor) -> Tensor:
        """The last nodes of the tree `parents` [B, N] (on the CPU): what their slots foretell [B, K, H].

        tokens [B, K] are theirs, feature [B, K, H] is what was foretold at their parents.
        """
        count = tokens.shape[1]
        window = self.cache.open(count, first=parents.shape[1] - count + 1, parents=parents)
        rotary = self.trunk.rotary(feature, window.positions)
        return self.head(self.trunk.embed(tokens), feature, rotary, window.mask, self.cache)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.committed.select(rows)
        self.final = [self.final[row] for row in rows.tolist()]


def build(
    network: Network,
    widths: Sequence[int] | None = None,
    tree_nodes: int | None = None,
    top_k: int = 4,
) -> EagleDrafter:
    """widths: children of every node at depth 0, 1, ..., a tree fixed before it is drawn; tree_nodes and
    top_k: EAGLE-2's tree. Without either a chain."""
    growth = read_growth("eagle", network.trunk.vocab_size, widths=widths, tree_nodes=tree_nodes, top_k=top_k)
    return EagleDrafter(network, need_head(network, "eagle"), growth)
