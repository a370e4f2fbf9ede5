"""A trunk's layer in few calls on packed weights: the same numbers, without the module code's overhead.

Covers the architectures of mtp.trunk: llama, mistral, qwen2 (bias on queries, keys and values) and qwen3
(norms of queries and keys). Shapes: B rows, W tokens, S slots, H hidden size, Q query heads, K key heads, D
head dimension.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers.activations import ACT2FN

from mtp.packed import PackedLinear, Product, RMSNorm, refuse, replace_modules

SILU = type(ACT2FN["silu"])


class FastLayer(nn.Module):
    """Stands where a decoder layer stood and is called as it was; `restore` gives that layer back."""

    def __init__(self, layer: Any, shared: Collection[int] = ()):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = [layer]  # in a list: no submodule, its weights are gone
        self.index = attention.layer_idx
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.key_heads = attention.k_proj.out_features // self.head_size
        self.group = attention.num_key_value_groups  # query heads for each key head
        self.query_heads = self.group * self.key_heads
        first, second = RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)
        self.qkv = Product([attention.q_proj, attention.k_proj, attention.v_proj], shared, first)
        self.out = Product([attention.o_proj], shared)
        self.gate_up = Product([mlp.gate_proj, mlp.up_proj], shared, second)
        self.down = Product([mlp.down_proj], shared)
        self.activation = silu if isinstance(mlp.act_fn, SILU) else mlp.act_fn
        self.epsilon = first.epsilon
        self.head_norms = head_norms(attention, self.key_heads)
        self.register_state_dict_pre_hook(refuse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse()

    def restore(self) -> nn.Module:
        for product in (self.qkv, self.out, self.gate_up, self.down):
            product.restore()
        return self.layer[0]

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        cache: Any = None,
        **_: Any,
    ) -> Tensor:
        """hidden [B, W, H] -> [B, W, H]; position_embeddings of FastRotary; mask and cache as in
        Trunk.run."""
        batch, width = hidden.shape[:2]
        heads = self.qkv(hidden).view(batch, width, -1, self.head_size)  # [B, W, Q+2K, D]
        turning, values = heads.split([self.query_heads + self.key_heads, self.key_heads], dim=2)
        queries, keys = turned(self._normed(turning), *position_embeddings).split(
            [self.query_heads, self.key_heads], dim=2
        )
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [B, K, W, D]
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        seen = attend(queries, keys, values, attention_mask, self.scale)
        hidden = self.out.plus(seen, hidden)
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down.plus(self.activation(gate) * up, hidden)

    __call__ = forward  # nobody hooks onto this one, and there are many calls of it

    def _normed(self, heads: Tensor) -> Tensor:
        """Queries and keys [B, W, Q+K, D], normed where the architecture says so."""
        if self.head_norms is None:
            return heads
        return rms_norm(heads, heads.shape[-1:], None, self.epsilon) * self.head_norms


def head_norms(attention: Any, key_heads: int) -> Tensor | None:
    """The weights [Q+K, D] of qwen3's norms of queries and keys."""
    if not hasattr(attention, "q_norm"):
        return None
    query = attention.q_norm.weight.detach().expand(key_heads * attention.num_key_value_groups, -1)
    return torch.cat([query, attention.k_norm.weight.detach().expand(key_heads, -1)])


class FastNorm(nn.Module):
    """Stands where a norm of the trunk's kind stood."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm
        self.rms = RMSNorm(norm)
        self.register_state_dict_pre_hook(refuse)

    def restore(self) -> nn.Module:
        return self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.rms(x)


class FastRotary(nn.Module):
    """Stands where the rotary embedding stood: cosines and sines [B, W, D], the first half of the sines
    negative."""

    def __init__(self, rotary: Any):
        super().__init__()
        self.rotary = rotary
        self.frequencies = torch.cat([-rotary.inv_freq, rotary.inv_freq]).float()  # [D]
        self.scale = float(rotary.attention_scaling)

    def restore(self) -> nn.Module:
        return self.rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cosines, sines = cosines * self.scale, sines * self.scale
        return cosines.to(x.dtype), sines.to(x.dtype)


def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of heads [B, W, N, D] = (a, b) in halves: (a cos - b sin, b cos + a sin)."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)  # (b, a)
    return torch.addcmul(heads * cosines.unsqueeze(2), swapped, sines.unsqueeze(2))


def additive(mask: Tensor | None, group: int, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask [B, 1, W, S] as numbers to add, [B, 1, W * group, S]: what `attend` wants of one.

    The heads that share a key are rows of one product there. Made once for all layers; what is already a
    number stays.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return numbers.repeat_interleave(group, dim=2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """queries [B, W, Q, D] on keys and values [B, K, S, D] -> [B, W, Q * D]; mask None is causal, of one
    query everything.

    No key is repeated for the heads that share it, and each is read once for all of them.
    """
    batch, width, heads, size = queries.shape
    key_heads = keys.shape[1]
    if mask is None and width > 1:
        keys, values = keys[:, :, :width], values[:, :, :width]
        seen = scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return seen.transpose(1, 2).reshape(batch, width, -1)
    group = heads // key_heads
    if width == 1:
        rows = queries.view(batch, key_heads, group, size)
        mask = additive(mask, group, queries.dtype)
        return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).view(
            batch, 1, -1
        )
    rows = queries.view(batch, width, key_heads, group, size).transpose(1, 2).flatten(2, 3)
    seen = scaled_dot_product_attention(
        rows, keys, values, attn_mask=additive(mask, group, queries.dtype), scale=scale
    )
    return seen.view(batch, key_heads, width, group, size).transpose(1, 2).reshape(batch, width, -1)


def pack(module: nn.Module, trunk: Any) -> None:
    """Put packed modules in the place of all layers of the trunk's kind and all linears below `module`."""
    shared = shared_weights(module)
    swap(
        module,
        trunk,
        lambda layer: FastLayer(layer, shared),
        lambda linear: PackedLinear(linear, shared),
        FastNorm,
    )


def shared_weights(module: nn.Module) -> set[int]:
    """Ids of the parameters that are an embedding, or the weight of more than one linear."""
    linears, embeddings = (
        [id(part.weight) for part in module.modules() if isinstance(part, kind)]
        for kind in (nn.Linear, nn.Embedding)
    )
    return {weight for weight, times in Counter(linears).items() if times > 1} | set(embeddings)


def swap(
    module: nn.Module,
    trunk: Any,
    new_layer: Callable[[nn.Module], nn.Module],
    new_linear: Callable[[nn.Linear], nn.Module],
    new_norm: Callable[[nn.Module], nn.Module],
) -> None:
    """Replace layers, linears, norms and rotary embedding of the trunk's kinds below `module`."""
    layer, norm, rotary = (
        type(trunk.layers[0]),
        type(trunk.model.model.norm),
        type(trunk.model.model.rotary_emb),
    )

    def new(child: nn.Module) -> nn.Module:
        if isinstance(child, layer):
            return new_layer(child)
        if isinstance(child, nn.Linear):
            return new_linear(child)
        if isinstance(child, norm):
            return new_norm(child)
        return FastRotary(child) if isinstance(child, rotary) else child

    replace_modules(module, new)


def restore(module: nn.Module) -> None:
    """Undo `swap`: every module and every weight as it was, bit for bit."""
    replace_modules(module, lambda child: getattr(child, "restore", lambda: child)())
