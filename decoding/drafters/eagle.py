"""Drafting with EAGLE's head: the trunk's states foretold, one position after the other.

Shapes: B rows, W positions run at once, K nodes of one depth, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.branching import Branches, read_widths
from decoding.cache import KVCache
from decoding.committed import Committed
from decoding.draft import Context, Draft, no_draft
from decoding.drafters.parallel import drafting_room
from decoding.heads import need_head
from decoding.ranking import Candidates
from mtp import Network, UserError
from mtp.eagle import Eagle
from mtp.errors import check_whole


class EagleDrafter:
    """With n committed tokens and the root at position n, slot j of its cache has token j+1 and feature f_j.

    Slots up to n-1, the root's, are of true tokens and the trunk's features, and final. A drafted node lies
    above them with a foretold feature; whatever the verdict, that is not the trunk's, so all such slots are
    dropped, and those of accepted tokens are computed from true features when it drafts again.
    """

    def __init__(
        self,
        network: Network,
        head: Eagle,
        *,
        widths: tuple[int, ...] = (),
        tree_nodes: int | None = None,
        top_k: int = 4,
    ):
        self.trunk, self.head = network.trunk, head
        self.widths, self.tree_nodes, self.top_k = widths, tree_nodes, top_k
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
        feature = self._caught_up(root)
        room = drafting_room(context.room, self.committed.lengths)
        if self.tree_nodes is None:
            return self._branches(feature, count, context).draft(room)
        return self._candidates(root, feature, count).draft(room, self.tree_nodes)

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

    def _branches(self, feature: Tensor, count: int, context: Context) -> Branches:
        """A tree, or a chain, whose slots are fixed before they are drawn."""
        branches, first = Branches(self.widths, context), 1
        for depth in range(1, count + 1):
            branches.grow(list(self.trunk.lm_head(feature).unbind(1)))
            if depth == count:
                break
            nodes = torch.tensor([node for node, _ in branches.level])
            above = torch.tensor([branches.parents[node - 1] for node in nodes.tolist()])
            fed = feature[:, (above - above.min()).to(feature.device)]
            tokens = torch.stack([path[:, -1] for _, path in branches.level], dim=1)
            parents = torch.tensor(branches.parents).expand(len(tokens), -1)
            feature = self._run(tokens, fed, parents, first)
            first += len(nodes)
        return branches

    def _candidates(self, root: Tensor, feature: Tensor, count: int) -> Candidates:
        """EAGLE-2: at each depth the children of the top_k most probable nodes."""
        found = Candidates(root, self.top_k)
        parents = torch.empty(len(root), 0, dtype=torch.long)
        for depth in range(1, count + 1):
            found.expand(self.trunk.lm_head(feature))
            if depth == count:
                break
            beam, start = found.beam, parents.shape[1] - feature.shape[1] + 1  # node of the beam before
            first = parents.shape[1] + 1
            parents = torch.cat([parents, beam.above.cpu() + start], dim=1)
            fed = feature.gather(1, beam.above[..., None].expand(-1, -1, feature.shape[2]))
            feature = self._run(beam.tokens, fed, parents, first)
        return found

    def _run(self, tokens: Tensor, feature: Tensor, parents: Tensor, first: int) -> Tensor:
        """Nodes first ... of the tree `parents` [B, N] (on the CPU): what their slots foretell [B, K, H].

        tokens [B, K] are theirs, feature [B, K, H] is what was foretold at their parents.
        """
        window = self.cache.open(tokens.shape[1], first=first, parents=parents)
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
    size = network.trunk.vocab_size
    if tree_nodes is not None:
        check_whole("drafter=eagle: tree_nodes", tree_nodes, 1)
        if widths is not None:
            raise UserError("drafter=eagle: widths and tree_nodes are two kinds of trees; give one of them")
    check_whole("drafter=eagle: top_k", top_k, 1)
    if top_k > size:
        raise UserError(f"drafter=eagle: top_k={top_k} is a tree wider than the vocabulary of {size}")
    head = need_head(network, "eagle")
    return EagleDrafter(
        network, head, widths=read_widths("eagle", widths, size), tree_nodes=tree_nodes, top_k=top_k
    )
