"""Drafters by name, with what they cannot be built without on a tiny network."""

from typing import Any

from tiny import tiny_trunk

from decoding import Drafter
from decoding.generate import build_drafter
from mtp import Network


def drafter_for(network: Network, name: str, **options: Any) -> Drafter:
    return build_drafter(network, name, **needed(network, name) | options)


def needed(network: Network, name: str) -> dict[str, Any]:
    """draft_model needs another model; hybrid is to look up often, so that rows of a batch differ."""
    if name == "draft_model":
        return {"model": tiny_draft(network)}
    if name == "layer_skip":
        return {"skip": [1]}  # with layers kept above it, whose keys of drafts must not stay
    return {"min_match": 2} if name == "hybrid" else {}


def tiny_draft(network: Network, seed: int = 11) -> Network:
    """A random model with the network's vocabulary: a bad draft model."""
    trunk = tiny_trunk(seed, layers=1, vocab_size=network.trunk.vocab_size, context=network.trunk.context)
    return Network(trunk.to(network.trunk.device, network.trunk.dtype))
