"""A linear and a norm as the C++ kernel computes them, for what stands outside of the layers."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mtp.kernel import library
from mtp.packed import refuse
from mtp.stacked import TILED, Stacked

MOST_TOKENS = 128  # of all rows together; beyond, torch's own products are faster than rows


class CompiledLinear(nn.Module):
    """Stands where an nn.Linear stood."""

    def __init__(self, original: nn.Linear, shared: Collection[int] = ()):
        super().__init__()
        self.linear = [original]  # in a list: no submodule, as in CompiledLayer
        self.stacked = Stacked([original], shared)
        self.matrix, self.product = self.stacked.matrix(), library().product
        self.made: dict[Any, Any] = {}  # what drafts with this output matrix, see mtp.drafting
        self.register_state_dict_pre_hook(refuse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse()

    @property
    def weight(self) -> Tensor:
        return self.stacked.rows() if self.stacked.released else self.linear[0].weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear[0].bias

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.numel() // x.shape[-1]
        if tokens > MOST_TOKENS and self.stacked.kind not in TILED:
            return linear(x, self.weight, self.bias)
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], self.matrix.outputs)
        self.product(self.matrix, tokens, x.data_ptr(), y.data_ptr())
        return y

    def restore(self) -> nn.Module:
        self.stacked.restore()
        return self.linear[0]


class CompiledNorm(nn.Module):
    """Stands where a norm of the trunk's kind stood."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm
        self.weight, self.epsilon, self.normalize = norm.weight, norm.variance_epsilon, library().normalize
        self.register_state_dict_pre_hook(refuse)

    def restore(self) -> nn.Module:
        return self.norm

    def forward(self, x: Tensor) -> Tensor:
        x, size = x.contiguous(), x.shape[-1]
        y = torch.empty_like(x)
        self.normalize(
            self.weight.data_ptr(), x.numel() // size, size, self.epsilon, x.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y
