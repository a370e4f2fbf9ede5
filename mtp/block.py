"""One decoder layer of the trunk's own kind, for heads that stack layers."""

import copy
from typing import Any

from torch import Tensor, nn

from mtp.trunk import Keys, Trunk


class Block(nn.Module):
    """A new layer of the trunk's own class, freshly initialised as the trunk's layers are.

    `index` is the layer number under which it addresses a cache.
    """

    def __init__(self, trunk: Trunk, index: int = 0):
        super().__init__()
        layer_class = type(trunk.layers[0])
        layer: Any = layer_class(trunk.config, layer_idx=0)
        layer.self_attn.layer_idx = index
        # Where layers are run again in the backward pass, transformers drops the cache of those without this.
        layer._can_checkpoint_with_cache = True
        initialise(layer, trunk)
        self.layer = layer

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Keys | None = None,
    ) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]; rotary, mask and cache as in Trunk.run."""
        return self.layer(hidden, attention_mask=mask, position_embeddings=rotary, cache=cache)


def initialise(module: nn.Module, trunk: Trunk) -> None:
    """Give a new module the trunk's own initial law (its `initializer_range`), device and dtype."""
    module.apply(trunk.model._init_weights)
    module.to(device=trunk.device, dtype=trunk.dtype)


def new_norm(trunk: Trunk) -> nn.Module:
    """A norm of the trunk's own kind with weight one."""
    norm = copy.deepcopy(trunk.model.model.norm)
    nn.init.ones_(norm.weight)
    return norm.requires_grad_(True)  # the trunk's own may be frozen
