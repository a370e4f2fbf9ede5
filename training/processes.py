"""Adding up gradients over processes, once a step, after all of a step's backward passes."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

AT_ONCE = 2**24  # numbers sent in one piece

Sum = Callable[[Tensor], Tensor]  # over all processes


def add_up(parameters: Sequence[nn.Parameter], total: Sum) -> None:
    """Give every parameter the sum of its gradients on all processes.

    A process whose rows all passed a layer by has no gradient for it while another has: it counts as zero
    there. A parameter without a gradient anywhere keeps none, as on a single process.
    """
    there = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    some = [p for p, count in zip(parameters, total(there).tolist(), strict=True) if count]
    for piece in pieces(some):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in piece]
        summed = total(torch.cat([gradient.flatten() for gradient in gradients]))
        for parameter, part in zip(piece, summed.split([p.numel() for p in piece]), strict=True):
            parameter.grad = part.view_as(parameter)


def pieces(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype, of at most AT_ONCE numbers unless one alone has more."""
    piece: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if piece and (size + parameter.numel() > AT_ONCE or parameter.dtype != piece[0].dtype):
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += parameter.numel()
    if piece:
        yield piece
