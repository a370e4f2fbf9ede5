"""Layer-skip drafting: the trunk's lower layers draft, its upper layers verify, nothing is computed twice."""

from typing import Any

from decoding.drafters.layer_skip import LayerSkip
from mtp import Network
from mtp.early_exit import check_exit_layer


def build(network: Network, exit_layer: int | None = None) -> LayerSkip:
    """exit_layer None: that of the network's own early_exit head, else half of the layers.

    Leaving early is to skip all layers above (LayerSkip, arXiv 2404.16710): the keys and states of the layers
    below serve scoring too, its shared cache. What the head has learned fits its own exit only.
    """
    trunk = network.trunk
    own: Any = dict(network.heads.items()).get("early_exit")
    if exit_layer is None:
        exit_layer = own.exit_layer if own else trunk.num_layers // 2
    check_exit_layer(exit_layer, trunk.num_layers)
    skip = tuple(range(exit_layer, trunk.num_layers))
    trained = own is not None and own.exit_layer == exit_layer
    return LayerSkip(trunk, skip, own if trained else None)
