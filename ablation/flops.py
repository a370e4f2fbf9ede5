"""What networks cost, from their matrices: parameters, FLOPs, bytes of cache.

A product with an [out, in] matrix is 2·out·in FLOPs a token forward, as much again for the gradient of its
input and of its weights: 6 N a token in training for N weights, the usual count. Attention scores, norms and
the embedding look-up are left out. The output matrix counts once for every prediction that is made with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from mtp import Network

FORWARD, INPUTS, WEIGHTS = 2, 2, 2  # FLOPs a weight and token: forward, gradient of inputs, of weights


@dataclass(frozen=True, slots=True)
class Work:
    """Weights that one drafted token is multiplied with, in layers and in the output matrix."""

    layers: int
    output: int

    @property
    def flops(self) -> int:
        return FORWARD * (self.layers + self.output)


def matrices(modules: Iterable[nn.Module]) -> int:
    """Weights that are multiplied with: norms and biases are not."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.dim() > 1)


def layer_weights(network: Network) -> int:
    """Of one trunk layer."""
    return matrices(network.trunk.layers) // network.trunk.num_layers


def output_weights(network: Network, head: Any = None) -> int:
    """Of the output matrix, as far as this head reads it: one with a draft vocabulary reads less."""
    ids = getattr(head, "draft_ids", None)
    rows = network.trunk.vocab_size if ids is None else len(ids)
    return rows * network.trunk.hidden_size


def stage_weights(network: Network, name: str) -> int:
    """Weights of what a head runs for one drafted token, without the trunk's output matrix."""
    head: Any = network.heads[name]
    parts = next((part for part in head.children() if isinstance(part, nn.ModuleList) and len(part)), None)
    if name == "early_exit" or parts is None:
        return matrices([head])
    return matrices(parts) // len(parts)


def drafting(network: Network, name: str, options: dict[str, Any], draft: Network | None) -> Work:
    """What drafting one token takes. Of an early exit all but the output matrix need not be done again."""
    if name == "draft_model" and draft is not None:
        return Work(matrices(draft.trunk.layers), output_weights(draft))
    if name == "early_exit":
        own = stage_weights(network, name) if name in network.heads else 0
        return Work(exit_layer(network, options) * layer_weights(network) + own, output_weights(network))
    if name not in network.heads:
        return Work(0, 0)  # it looks up
    if name == "medusa":
        return Work(0, stage_weights(network, name))  # its matrices are its own
    return Work(stage_weights(network, name), output_weights(network, network.heads[name]))


def exit_layer(network: Network, options: dict[str, Any]) -> int:
    heads: dict[str, Any] = dict(network.heads.items())
    own = heads["early_exit"].exit_layer if "early_exit" in heads else network.trunk.num_layers // 2
    return options.get("exit_layer") or own


def trunk_flops(network: Network) -> int:
    """Of one token forward."""
    return FORWARD * (matrices(network.trunk.layers) + output_weights(network))


def extra_prefill(network: Network, name: str, draft: Network | None, length: int) -> int:
    """FLOPs that a drafter adds to every token of the prompt: its own layers, for every depth it drafts."""
    if name == "draft_model" and draft is not None:
        return FORWARD * matrices(draft.trunk.layers)
    if name in ("early_exit", "medusa") or name not in network.heads:
        return 0
    return FORWARD * stage_weights(network, name) * streams(network.heads[name], name, length)


def streams(head: Any, name: str, length: int) -> int:
    """How many caches of one layer a head keeps: one a depth, EAGLE one for all, matrices none."""
    if name == "eagle":
        return 1
    if name not in ("sequential", "parallel") or head.options.get("form") == "linear":
        return 0
    return length if name == "sequential" else min(length, head.depth)


def training_flops(network: Network, config: dict[str, Any]) -> int:
    """Of one token of a training run.

    A trunk that is trained: 6 N. A frozen one: 2 N for its forward pass, or nothing where its states lie on
    the disk: they are computed once for all runs. A head: 6 N for its own weights at every depth, and the
    output matrix again for every depth: 6 where it is trained, 4 where it is frozen (its inputs' gradient
    only).
    """
    frozen = config["trunk"]["frozen"]
    trained = FORWARD + INPUTS + WEIGHTS
    total = 0
    if not frozen:
        total += trained * (matrices(network.trunk.layers) + output_weights(network))
    elif not config["data"].get("states"):
        total += FORWARD * matrices(network.trunk.layers)
    through = FORWARD + INPUTS if frozen else trained
    for name in config["heads"]:
        head: Any = network.heads[name]
        readouts = exits(head, config["objective"]) if name == "early_exit" else head.depth
        own = stage_weights(network, name) * (
            head.depth if name in ("sequential", "parallel", "medusa") else 1
        )
        output = 0 if name == "medusa" else output_weights(network, head)
        total += trained * own + int(through * output * readouts)
    return total


def exits(head: Any, objective: dict[str, Any]) -> float:
    """How many exits are read out in a step, on average: one with an adapter; all, or those whose turn it is.

    Every exit is read, but one without weight this step has no loss and costs nothing.
    """
    count = len(head.taps)
    if count == 1 or objective["curriculum"] == "none":
        return count
    return count / objective["rotation"] if objective["curriculum"] == "rotational" else count / 2


def cache_bytes(network: Network, name: str, draft: Network | None, length: int) -> int:
    """Bytes of keys and values that a drafter adds for every token of text."""
    if name == "draft_model" and draft is not None:
        return draft.trunk.num_layers * layer_cache_bytes(draft)
    head = dict(network.heads.items()).get(name)
    return 0 if head is None else streams(head, name, length) * layer_cache_bytes(network)


def layer_cache_bytes(network: Network) -> int:
    """Keys and values of one layer: 2 heads of 8 numbers in float32 are 2 · 2 · 8 · 4 = 128 bytes."""
    config = network.trunk.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_key_value_heads * size * network.trunk.dtype.itemsize
