"""FSDP2: every decoder layer, of trunk and heads, lies in pieces over the processes; all else is whole.

A layer is put together when it runs and taken apart again; its gradients are added up in pieces. Embeddings,
norms and output matrices are read by many hands, and are too small a part to be worth the waiting.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from mtp import Network


def shard(network: Network, mesh: Any) -> None:
    """Take all decoder layers apart over the processes of a one-dimensional mesh, once is enough."""
    layers = [one for one in network.modules() if isinstance(one, GradientCheckpointingLayer)]
    for layer in (one for one in layers if not isinstance(one, FSDPModule)):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def whole_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict with every tensor whole, on the CPU; all processes must call it."""
    state = network.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu() for name, t in state.items()}


def sum_pieces(parameters: Iterable[nn.Parameter], processes: int) -> list[nn.Parameter]:
    """Make sums of the gradients in pieces, which are means over the processes; give the whole parameters."""
    whole = []
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            whole.append(parameter)
        elif parameter.grad is not None:
            parameter.grad.mul_(processes)
    return whole


def clip(parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """Scale the gradients, whole and in pieces, to a common norm of `most` at most; the norm before."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    pieces: list[Tensor] = [grad for grad in grads if isinstance(grad, DTensor)]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    if not pieces:
        return torch.nn.utils.clip_grad_norm_(parameters, most)
    norms = [torch.nn.utils.get_total_norm(grads) for grads in (pieces, whole) if grads]
    parts = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.stack(parts).norm()
    factor = min(1.0, most / (norm.item() + 1e-6))
    for grad in (*pieces, *whole):
        grad.mul_(factor)
    return norm
