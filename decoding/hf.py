"""Speculation inside transformers: `model.generate(ids, custom_generate=speculative(drafter="ngram"))`.

Shapes: B rows, T tokens with padding on the left, V vocabulary.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.draft import Drafter
from decoding.generate import build_drafter, check_verifier, policy
from decoding.hf_checks import arguments, check_arguments, check_config, left_padding
from decoding.loop import VERIFIERS, decode
from decoding.noise import SEEDS
from decoding.processors import Processor
from decoding.prompts import Prompt, check_ids
from decoding.rows import Emitted, Row
from decoding.sampling import Sampling
from decoding.stopping import Limits, Output
from mtp import Network, Trunk, UserError
from mtp.errors import check_whole

WARPERS = {  # in transformers' order, which is ours
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True, slots=True)
class Batch:
    """What transformers has prepared: token ids [B, T], how much of every row is padding, and the rules."""

    ids: Tensor
    padding: list[int]
    processors: list[Processor]
    criteria: list[Any]


def speculative(
    drafter: str | Drafter = "ngram",
    *,
    network: Network | None = None,
    num_draft_tokens: int | str = 4,
    verifier: str = "token",
    seed: int | None = None,
    **options: Any,
) -> Callable[..., Tensor]:
    """A `custom_generate` for transformers' `generate`: same tokens when greedy, same law when sampling.

    All verifiers but `typical` keep that. drafter with its options, num_draft_tokens and verifier are as in
    decoding.generate. network is needed where the drafter reads heads or a tokenizer; `generate` is then that
    of network.trunk.model. seed None takes one from torch's generator, so torch.manual_seed holds; row r has
    seed + r. Logits processors and stopping criteria see one row at a time, [1, T] with its padding. Stop
    strings come as a StopStringCriteria. What cannot be done exactly raises UserError.
    """
    if num_draft_tokens != "auto":
        check_whole("num_draft_tokens", num_draft_tokens, 0)
    check_verifier(verifier)

    if seed is not None:
        check_whole("seed", seed, -SEEDS, SEEDS)
    if options and not isinstance(drafter, str):
        raise UserError(f"{next(iter(options))}: a drafter that is built already takes no options")

    @functools.lru_cache(maxsize=1)  # a drafter may hold what was measured and found for this model
    def built(model: Any) -> tuple[Network, Drafter]:
        if network is not None and network.trunk.model is not model:
            raise UserError("network: its trunk is not the model whose generate was called")
        used = network or Network(Trunk(model))
        return used, build_drafter(used, drafter, **options) if isinstance(drafter, str) else drafter

    def custom_generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        **inputs: Any,
    ) -> Tensor:
        around = arguments(inspect.currentframe())
        check_config(generation_config)
        check_arguments(around, input_ids, inputs)
        batch = Batch(input_ids, left_padding(input_ids, inputs), [*logits_processor], [*stopping_criteria])
        attention = model.config._attn_implementation
        try:
            used, drafts = built(model)
            if attention != "sdpa":
                model.set_attn_implementation("sdpa")  # others let every token see all where there is no mask
            start = seed or 0
            if seed is None and generation_config.do_sample:
                start = int(torch.randint(SEEDS, ()))
            rows = make_rows(used, batch, generation_config, start)
            observe = streaming(around.get("streamer"))
            length = policy(num_draft_tokens, used, rows, drafts, verifier, asked=drafts)
            decode(used, rows, drafts, length, VERIFIERS[verifier], observe)
        finally:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)
        if around.get("streamer") is not None:
            around["streamer"].end()
        return joined(input_ids, rows, generation_config._pad_token_tensor)

    return custom_generate


def make_rows(network: Network, batch: Batch, config: Any, seed: int) -> list[Row]:
    """One Row for every row of input_ids, its padding taken off."""
    rules, settings = settings_of(batch.processors, bool(config.do_sample))
    width = batch.ids.shape[1]
    longest = [rule.max_length for rule in batch.criteria if isinstance(rule, MaxLengthCriteria)]
    eos = [
        t for rule in batch.criteria if isinstance(rule, EosTokenCriteria) for t in rule.eos_token_id.tolist()
    ]
    limits = Limits(max(0, min([config.max_length, *longest]) - width), eos_token_ids=tuple(eos))
    others = [rule for rule in batch.criteria if not isinstance(rule, (MaxLengthCriteria, EosTokenCriteria))]
    if len(batch.ids) > 1 and any(isinstance(rule, PrefixConstrainedLogitsProcessor) for rule in rules):
        raise UserError("prefix_allowed_tokens_fn: one row is supported with speculative decoding")
    rows = []
    for r, (line, padding) in enumerate(zip(batch.ids.tolist(), batch.padding, strict=True)):
        ids = check_ids(line[padding:], network.trunk.vocab_size)
        if len(ids) + limits.max_new_tokens > network.trunk.context:
            raise UserError(
                f"max_new_tokens={limits.max_new_tokens} after a prompt of {len(ids)} tokens is more than "
                f"the context of {network.trunk.context}"
            )
        front = batch.ids[r : r + 1, :padding]
        criteria = tuple(functools.partial(ended, rule, front) for rule in others)
        output = Output(ids, replace(limits, criteria=criteria), None)
        own: list[Processor] = [functools.partial(with_padding, of_row(rule, r), front) for rule in rules]
        rows.append(Row(r, Prompt(ids, None), settings, seed + r, output, own))
    return rows


def settings_of(processors: list[Processor], sampled: bool) -> tuple[list[Processor], Sampling]:
    """transformers' processors -> those that must be called, and settings that stand for the last of them.

    Temperature, top-k, top-p and min-p at the end, in this order, are ours, computed for all rows at once.
    """
    rules, found, order = list(processors), dict[str, Any](), list(WARPERS)
    while rules and type(rules[-1]) in order:
        name = WARPERS[type(rules[-1])]
        if getattr(rules[-1], "min_tokens_to_keep", 1) != 1:
            break
        order = order[: order.index(type(rules[-1]))]
        found[name] = getattr(rules.pop(), name)
    return rules, Sampling(**({"temperature": 1.0} | found if sampled else {}))


def of_row(rule: Any, row: int) -> Processor:
    """A penalty that leaves padding out knows every row's own."""
    if isinstance(rule, RepetitionPenaltyLogitsProcessor) and isinstance(rule.prompt_ignore_length, Tensor):
        return RepetitionPenaltyLogitsProcessor(rule.penalty, int(rule.prompt_ignore_length[row]))
    return rule


def with_padding(rule: Processor, front: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """ids [1, t] -> what the rule says after front and ids: lengths that it knows count the padding.

    It runs where input_ids are, as its own tensors do; the model may be elsewhere.
    """
    text = torch.cat([front, ids.to(front.device)], dim=1)
    return rule(text, scores.to(front.device)).to(scores.device)


def ended(rule: Any, front: Tensor, ids: list[int]) -> bool:
    """Whether a stopping criterion is met by a row's ids, its padding put back."""
    text = torch.cat([front, torch.tensor([ids], device=front.device)], dim=1)
    return bool(torch.as_tensor(rule(text, None)).all())


def streaming(streamer: Any) -> Callable[[Emitted], None] | None:
    """Tokens go to a streamer one by one, as transformers gives them; the prompt has gone there already."""
    if streamer is None:
        return None

    def observe(emitted: Emitted) -> None:
        for token in emitted.tokens:
            streamer.put(torch.tensor([token]))

    return observe


def joined(ids: Tensor, rows: list[Row], pad: Tensor | None) -> Tensor:
    """Prompts and outputs [B, T + longest output], shorter rows filled with the padding token."""
    longest = max(len(row.output.token_ids) for row in rows)
    fill = 0 if pad is None else int(pad)
    lines = [[*row.output.token_ids, *[fill] * (longest - len(row.output.token_ids))] for row in rows]
    return torch.cat([ids, torch.tensor(lines, dtype=ids.dtype, device=ids.device)], dim=1)
