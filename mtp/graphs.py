"""Decoding on a CUDA device without launching its hundreds of small kernels one by one.

A GPU decodes one text as fast as the processor tells it what to do. Here a run of layers over a few nodes is
recorded once as a CUDA graph and then replayed in one call. A graph knows shapes and addresses only, so nodes
are padded to one of WIDTHS, the mask spans a whole buffer of keys, and the buffers stay where they are
(mtp.graph_memory). What lies between attention and the next attention is fused by torch.compile, one
compilation a width for all layers; inductor keeps it on disk. On a CPU the same steps run, and replaying is
calling them again: that is what tests can see without a GPU.

Shapes: B rows, W nodes, P nodes after padding, N = B P, S slots, H hidden size, Q query heads, K key heads, D
head dimension.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mtp.fast_layer import additive, attend
from mtp.fused import WIDTHS, Attention, Rest, Shared, Tell
from mtp.graph_memory import Inputs, Memory
from mtp.packed import joined_bias, refuse, replace_modules

MOST_TOKENS = 64  # in all rows of a batch
WARM_UPS = 3  # runs before a capture: libraries choose and load their kernels in the first ones


def why_not(device: torch.device, config: Any) -> str | None:
    """Why a trunk's steps cannot be captured, or None where they can."""
    if device.type != "cuda":
        return f"graphs are captured on CUDA devices, and this network is on {device.type}"
    if config.hidden_act != "silu":
        return f"graphs know the activation silu only, and this network has {config.hidden_act}"
    return None


class CapturedLayer(nn.Module):
    """Stands where a decoder layer stood and is called as it was; `restore` gives that layer back."""

    def __init__(self, layer: Any, shared: Shared, memory: Memory | None = None):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = [layer]  # in a list: no submodule, as its weights are views of those below
        self.index, self.size, self.scale = attention.layer_idx, attention.head_dim, attention.scaling
        self.shared, self.memory = shared, Memory() if memory is None else memory
        self.joined = ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj])
        qkv, gate_up = map(join, self.joined)
        self.heads = (
            attention.q_proj.out_features // self.size,
            attention.k_proj.out_features // self.size,
        )
        self.epsilon = layer.input_layernorm.variance_epsilon
        head_norm = lambda name: norm.weight.data if (norm := getattr(attention, name, None)) else None  # noqa: E731
        self.attention = Attention(
            layer.input_layernorm.weight.data,
            qkv,
            joined_bias(self.joined[0]),
            head_norm("q_norm"),
            head_norm("k_norm"),
        )
        self.rest = Rest(
            attention.o_proj.weight.data, joined_bias([attention.o_proj]),
            layer.post_attention_layernorm.weight.data,
            gate_up, joined_bias(self.joined[1]),
            mlp.down_proj.weight.data, joined_bias([mlp.down_proj]),
        )  # fmt: skip
        self.next: list[CapturedLayer] = []  # the trunk's following layer, in a list: no submodule
        self.passes: dict[Any, Pass] = {}
        self.register_state_dict_pre_hook(refuse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse()

    def restore(self) -> nn.Module:
        for linears in self.joined:
            for one in linears:
                one.weight.data = one.weight.data.clone()
        return self.layer[0]

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        cache: Any = None,
        **_: Any,
    ) -> Tensor:
        """hidden [B, W, H] -> [B, W, H]; the other arguments as in Trunk.run."""
        if self.takes(hidden, attention_mask, cache):
            return self.run(hidden, (1,), attention_mask, position_embeddings, cache)[0]
        return self.layer[0](
            hidden, attention_mask=attention_mask, position_embeddings=position_embeddings, cache=cache
        )

    def takes(self, hidden: Tensor, mask: Tensor | None, cache: Any) -> bool:
        """Whether a graph can run this: few nodes, a boolean mask, and a cache that lends its buffers."""
        few = hidden.shape[1] <= WIDTHS[-1] and len(hidden) * padded(hidden.shape[1]) <= MOST_TOKENS
        return few and hasattr(cache, "settle") and (mask is None or mask.dtype == torch.bool)

    def run(
        self, hidden: Tensor, ends: tuple[int, ...], mask: Tensor | None, rotary: Any, cache: Any
    ) -> Tensor:
        """Run ends[-1] layers of the trunk from this one on in one graph; the states [len(ends), B, W, H]
        after so many of them. As in CompiledLayer.run."""
        batch, width = hidden.shape[:2]
        indices, wide = range(self.index, self.index + ends[-1]), padded(width)
        storage = cache.settle(indices, hidden, self.heads[1], self.size, self.memory)
        key = (ends, batch, wide, *(keys.data_ptr() for keys, _ in storage.stored.layers))
        if key not in self.passes:
            inputs = Inputs(hidden, rotary[0], wide, storage.stored.layers[0][0].shape[2])
            self.passes[key] = Pass(self.chain(ends[-1]), ends, storage.stored.layers, inputs)
        one = self.passes[key]
        one.inputs.fill(hidden, rotary, mask, storage)
        return one.replay()[:, :, :width].clone()  # the next replay writes over it

    def chain(self, count: int) -> list["CapturedLayer"]:
        """This layer and those that follow it, `count` in all."""
        found = [self]
        while len(found) < count:
            found += found[-1].next
        return found

    def step(self, hidden: Tensor, inputs: Inputs, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """hidden [B, P, H] -> [B, P, H]; keys and values [B, K, S, D] get those of the nodes."""
        batch, width = hidden.shape[:2]
        ask, answer = self.shared.functions(batch * width)
        flat = hidden.flatten(0, 1)
        rotary = (inputs.cosines.flatten(0, 1), inputs.sines.flatten(0, 1))
        new = ask(flat, rotary, self.attention, self.epsilon, self.heads)
        query, key, value = (part.unflatten(0, (batch, width)) for part in new)
        keys[inputs.rows, :, inputs.slots] = key
        values[inputs.rows, :, inputs.slots] = value
        seen = attend(query, keys, values, mask, self.scale)
        return answer(seen.flatten(0, 1), flat, self.rest, self.epsilon).view_as(hidden)


class Pass:
    """A run of layers on fixed inputs and fixed buffers, captured when it is first replayed."""

    def __init__(
        self,
        layers: list[CapturedLayer],
        ends: tuple[int, ...],
        stored: list[tuple[Tensor, Tensor]],
        inputs: Inputs,
    ):
        self.layers, self.ends, self.stored, self.inputs = layers, ends, stored, inputs
        self.captured: Callable[[], Tensor] | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> Tensor:
        """States [len(ends), B, P, H]; always in one mode, as compiled functions know tensors of one kind."""
        queries, keys = self.layers[0].heads
        hidden, states = self.inputs.hidden, []
        mask = additive(self.inputs.mask, queries // keys, hidden.dtype)
        assert mask is not None
        for number, (layer, pair) in enumerate(zip(self.layers, self.stored, strict=True), start=1):
            hidden = layer.step(hidden, self.inputs, mask, *pair)
            if number in self.ends:
                states.append(hidden)
        return torch.stack(states)

    def replay(self) -> Tensor:
        if self.captured is None:
            self.captured = capture(self.step, self.inputs.hidden.device, self.layers[0].shared)
        return self.captured()


def capture(step: Callable[[], Tensor], device: torch.device, shared: Shared) -> Callable[[], Tensor]:
    """`step` as a CUDA graph: call the result to run it again. Where there is no CUDA it is `step` itself.

    Its inputs must be filled: they are run, and keys and values written, before anything is recorded.
    """
    if device.type != "cuda":
        return step
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=shared.pool):
            states = step()
        shared.pool = graph.pool()

    def replay() -> Tensor:
        graph.replay()
        return states

    return replay


def padded(width: int) -> int:
    """The width that so many nodes are run at.

    >>> padded(5)
    8
    """
    return next(wide for wide in WIDTHS if wide >= width)


def join(linears: Sequence[nn.Linear]) -> Tensor:
    """Their weights one under the other [O, I]; theirs become views of it, so nothing is held twice."""
    weight = torch.cat([one.weight.data for one in linears])
    for one, part in zip(linears, weight.split([one.out_features for one in linears]), strict=True):
        one.weight.data = part
    return weight


def capture_modules(module: nn.Module, trunk: Any, tell: Tell | None) -> None:
    """Put captured layers in the place of all layers of the trunk's kind below `module`; with `tell`, what
    goes between attentions is compiled first, and it is told how far that is."""
    shared, own, kind = Shared(), Memory(), type(trunk.layers[0])
    trunks = set(map(id, trunk.layers))

    def new(child: nn.Module) -> nn.Module:
        if not isinstance(child, kind):
            return child
        return CapturedLayer(child, shared, own if id(child) in trunks else None)

    replace_modules(module, new)
    for layer, following in pairwise(trunk.layers):
        layer.next = [following]
    if tell is not None:
        shared.prepare(trunk.layers[0], tell)
