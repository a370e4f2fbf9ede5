"""What transformers' generate was asked for that speculation cannot do: refused by name, never ignored.

Shapes: B rows, T tokens with padding on the left.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mtp import UserError

# What these say is in the processors and criteria that transformers has made of them, or is done here.
SUPPORTED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "renormalize_logits",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "num_return_sequences", "pad_token_id",
    "bos_token_id", "eos_token_id", "decoder_start_token_id", "disable_compile", "transformers_version",
}  # fmt: skip
NEUTRAL = GenerationConfig._get_default_generation_params()
INPUTS = ("attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep")


def arguments(frame: Any) -> dict[str, Any]:
    """The arguments of the `generate` that called `frame`.

    transformers 5.24 keeps streamer, assistant_model and synced_gpus from a callable: they are looked up
    where they stand, to serve the first and refuse the others.
    """
    caller = frame.f_back if frame else None
    return dict(caller.f_locals) if caller is not None and caller.f_code.co_name == "generate" else {}


def check_config(config: Any) -> None:
    """Refuse by name every setting that speculation would have to ignore."""
    for name, value in vars(config).items():
        if name.startswith("_") or name in SUPPORTED or value is None:
            continue
        if value != NEUTRAL.get(name, False):
            raise UserError(f"{name}={value!r} is not supported with speculative decoding")


def check_arguments(around: dict[str, Any], ids: Tensor, inputs: dict[str, Any]) -> None:
    for name in ("assistant_model", "synced_gpus"):
        if around.get(name):
            raise UserError(f"{name} is not supported with speculative decoding; choose a drafter instead")
    for name, value in inputs.items():
        if name not in INPUTS and value is not None:
            raise UserError(f"{name} is not supported with speculative decoding")
    if getattr(inputs.get("cache"), "_is_user_defined", False):
        raise UserError("cache: speculative decoding keeps its own; none can be given")
    if ids.shape[1] == 0:
        raise UserError("input_ids has no token; at least one is needed")
    if around.get("streamer") is not None and len(ids) > 1:
        raise UserError(f"streamer: {len(ids)} rows, but one can be streamed")


def left_padding(ids: Tensor, inputs: dict[str, Any]) -> list[int]:
    """How many tokens of every row are padding; UserError where a mask hides anything else."""
    given = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if given is None else given.long()
    if mask.shape != ids.shape or bool((mask[:, 1:] < mask[:, :-1]).any()) or bool((mask[:, -1] != 1).any()):
        raise UserError("attention_mask: only padding on the left is supported")
    positions = inputs.get("position_ids")
    if positions is not None and bool(((positions != mask.cumsum(1) - 1) & (mask == 1)).any()):
        raise UserError("position_ids: only positions that count a row's own tokens from 0 are supported")
    return (mask == 0).sum(1).tolist()
