"""A Hugging Face causal LM seen as embed / run(layers a..b) / unembed.

Shapes: B rows, T tokens, H hidden size, V vocabulary, L layers, D head dimension, S cached slots.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mtp.compiled import CompiledLayer
from mtp.errors import UserError
from mtp.fast_layer import FastLayer, additive
from mtp.graphs import CapturedLayer
from mtp.scoring import scorer_of

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# These rescale the rotary frequencies by the length seen so far: a token's key then depends on later text.
LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")


class Keys(Protocol):
    """What a layer needs of a cache: store this call's keys and values, return all that it may attend to."""

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class TrunkOutput:
    """What a pass over the trunk leaves behind."""

    states: dict[
        int, Tensor
    ]  # tap -> [B, T, H]; tap l is the state after l layers, tap L after the final norm
    logits: Tensor | None  # [B, T, V]
    best: Tensor | None = None  # [B, T] the first of the best tokens, where it is known


class Trunk(nn.Module):
    """A decoder-only causal LM of the common skeleton: embedding, layers, rotary embedding, norm, output
    head.

    `model` is the Hugging Face model itself and stays usable as such; its layers are called one by one so
    that heads can read, leave and enter between them. Any other architecture raises UserError with its name.
    """

    def __init__(self, model: Any):
        super().__init__()
        check_architecture(model.config)
        if model.config._attn_implementation != "sdpa":  # without a mask, others let every token see all
            model.set_attn_implementation("sdpa")
        self.model = model

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and casts go to all weights and buffers, but rotary frequencies stay in float32: rounded to
        bfloat16 they would turn far positions by wrong angles."""
        before = {name: buffer for name, buffer in self.named_buffers() if "inv_freq" in name}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            place, _, key = name.rpartition(".")
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                setattr(self.get_submodule(place), key, buffer.to(moved.device))
        return self

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.model.layers

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """Most tokens of one text. A sliding window bounds it: within its first window it is full
        attention."""
        window = getattr(self.config, "sliding_window", None)
        use_window = getattr(self.config, "use_sliding_window", True)
        limit = self.config.max_position_embeddings
        return min(limit, window) if window and use_window else limit

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.model.embed_tokens(tokens)  # [B, T] -> [B, T, H]

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.model.rotary_emb(hidden, positions)  # [B, T] -> two of [B, T, D]

    def norm(self, hidden: Tensor) -> Tensor:
        return self.model.model.norm(hidden)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)  # [B, T, H] -> [B, T, V]

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def run(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Keys | None = None,
        taps: tuple[int, ...] = (),
        keep: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run layers first..last-1 on `hidden` [B, T, H]; return it and the states after the tapped layers.

        positions [B or 1, T] default to 0..T-1; mask [B or 1, 1, T, S] is boolean, True where a query may
        look, None is causal. keep [L, B] (on the CPU) says which rows run each layer: layer dropout while
        training.
        """
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotary = self.rotary(hidden, positions)
        states = {first: hidden} if first in taps else {}
        layer = self.layers[first] if first < last else None
        whole = layer if keep is None and isinstance(layer, (CompiledLayer, CapturedLayer)) else None
        if whole is not None and whole.takes(hidden, mask, cache):
            inside = [tap for tap in taps if first < tap <= last and tap < self.num_layers]
            ends = tuple(sorted({tap - first for tap in (*inside, last)}))
            ran = whole.run(hidden, ends, mask, rotary, cache)
            return ran[-1], states | {tap: ran[ends.index(tap - first)] for tap in inside}
        if mask is None and (causal := getattr(cache, "causal_mask", None)):
            mask = causal()  # these layers do not know how much text goes before
        if isinstance(layer, FastLayer):
            mask = additive(mask, layer.group, hidden.dtype)  # here, once for all layers
        for index, layer in enumerate(list(self.layers)[first:last], start=first):
            if keep is None or bool(keep[index].all()):
                hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, cache=cache)
            else:
                hidden = run_some_rows(layer, hidden, keep[index], mask=mask, rotary=rotary)
            if index + 1 in taps and index + 1 < self.num_layers:
                states[index + 1] = hidden
        return hidden, states

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Keys | None = None,
        start: int = 0,
        states: Tensor | None = None,
        taps: tuple[int, ...] = (),
        keep: Tensor | None = None,
        logits: bool = True,
    ) -> TrunkOutput:
        """Score tokens [B, T]. With `start` > 0 their `states` [B, T, H] after that many layers are given and
        only the layers above run."""
        if keep is None and (scorer := scorer_of(self, start, tokens, mask, cache)):
            if positions is None:
                positions = torch.arange(tokens.shape[1])[None]
            found = scorer(
                tokens, start, states, positions=positions, mask=mask, cache=cache, taps=taps, logits=logits
            )
            return TrunkOutput(*found)
        hidden = self.embed(tokens) if states is None else states
        hidden, tapped = self.run(
            hidden, start, self.num_layers, positions=positions, mask=mask, cache=cache, taps=taps, keep=keep
        )
        if not logits and self.num_layers not in taps:
            return TrunkOutput(tapped, None)
        normed = self.norm(hidden)
        if self.num_layers in taps:
            tapped[self.num_layers] = normed
        return TrunkOutput(tapped, self.lm_head(normed) if logits else None)


def run_some_rows(
    layer: nn.Module, hidden: Tensor, keep: Tensor, *, mask: Tensor | None, rotary: Any
) -> Tensor:
    """x + M f(x) per row: the rows with keep [B] True run the layer, the others pass by (LayerSkip, eq.
    1)."""
    rows = keep.nonzero()[:, 0].to(hidden.device)
    if not len(rows):
        return hidden
    pick = lambda x: x if x is None or len(x) == 1 else x[rows]  # noqa: E731
    ran = layer(hidden[rows], attention_mask=pick(mask), position_embeddings=tuple(map(pick, rotary)))
    return hidden.index_copy(0, rows, ran)


def check_architecture(config: Any) -> None:
    """Raise UserError unless the model is of the common skeleton and its keys depend on earlier tokens
    only."""
    if config.model_type not in ARCHITECTURES:
        raise UserError(f"model: architecture {config.model_type!r} is not one of {', '.join(ARCHITECTURES)}")
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary in LENGTH_DEPENDENT_ROTARY:
        raise UserError(
            f"model: rotary embedding {rotary!r} depends on the length of the text, so no draft is exact"
        )
