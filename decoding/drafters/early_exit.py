"""Layer-skip drafting: the trunk's lower layers draft, its upper layers verify, nothing is computed twice.

Shapes: B rows, N draft nodes, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.draft import Context, Draft, chain, no_draft
from mtp import Network
from mtp.early_exit import check_exit_layer


class EarlyExitDrafter:
    """Drafts with layers 0 ... exit_layer-1 and the shared output head (LayerSkip, arXiv 2404.16710).

    Root and nodes go through the lower layers one by one; their keys stay in the trunk's cache as scratch and
    their states are handed on, so that scoring runs only the layers above (LayerSkip's shared cache).
    """

    taps: tuple[int, ...] = ()

    def __init__(self, network: Network, exit_layer: int):
        self.trunk = network.trunk
        self.exit_layer = exit_layer
        self.cache: KVCache | None = None

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.cache = cache

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        pass

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, max(context.room))
        if count <= 0:
            return no_draft(root)
        tokens, laws = [root], []
        states = [self._lower(root, node=0)]
        for depth in range(1, count + 1):
            logits = self.trunk.unembed(states[-1])[:, 0]
            law = context.law(logits, torch.stack(tokens[1:], 1) if depth > 1 else root[:, None][:, :0])
            token, q = context.draw(law, depth, depth)
            tokens.append(token)
            laws.append(q)
            states.append(self._lower(token, node=depth))
        draft = chain(tokens[1:], laws, context.room)
        return Draft(draft.tokens, draft.parents, draft.q, self.exit_layer, torch.cat(states, dim=1))

    def _lower(self, token: Tensor, node: int) -> Tensor:
        """token [B] -> its state [B, 1, H] after the lower layers; keys go to the scratch slot of `node`."""
        assert self.cache is not None
        window = self.cache.open(1, first=node)
        hidden, _ = self.trunk.run(
            self.trunk.embed(token[:, None]), 0, self.exit_layer,
            positions=window.positions, mask=window.mask, cache=self.cache,
        )  # fmt: skip
        return hidden

    def select(self, rows: Tensor) -> None:
        pass


def build(network: Network, exit_layer: int | None = None) -> EarlyExitDrafter:
    """exit_layer None: that of the network's own early_exit head, else half of the layers."""
    layers = network.trunk.num_layers
    own: Any = dict(network.heads.items()).get("early_exit")
    if exit_layer is None:
        exit_layer = own.exit_layer if own else layers // 2
    check_exit_layer(exit_layer, layers)
    return EarlyExitDrafter(network, exit_layer)
