"""The one loop: prefill, propose, score, verify, commit. Plain decoding is the same loop with no drafts.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import importlib
import pkgutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import decoding.drafters
from decoding.cache import KVCache
from decoding.context import StepContext
from decoding.draft import Draft, Drafter, Verdict
from decoding.draft_length import Policy, policy
from decoding.noise import SEEDS
from decoding.processors import processors
from decoding.prompts import PromptLike, read_prompt
from decoding.rows import Completion, Emitted, Row, emit
from decoding.sampling import RowSampling, Sampling
from decoding.stopping import Limits, Output, check_stop
from decoding.traversal import verify_traversal
from decoding.tree import height, is_chain
from decoding.verify import verify_block, verify_token, verify_typical
from mtp import Network, UserError
from mtp.errors import check_whole


@dataclass(frozen=True, slots=True)
class Verifier:
    """A rule that accepts drafts. Coupled: laws are made one-hot by the position's noise before it looks."""

    verify: Callable[[Tensor, Draft, Tensor], Verdict]
    coupled: bool = False
    lossless: bool = True
    trees: bool = True  # whether it tests siblings


# Told after every step: rows (with its tokens), draft, p and logits [B, N+1, V], verdict.
Trace = Callable[[list[Row], Draft, Tensor, Tensor, Verdict], None]
GREEDY = Sampling()
VERIFIERS = {
    "token": Verifier(verify_token),
    "block": Verifier(verify_block, trees=False),
    "traversal": Verifier(verify_traversal),
    "coupled": Verifier(verify_token, coupled=True),
    "typical": Verifier(verify_typical, lossless=False),
}


def generate(
    network: Network,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    drafter: str | Drafter = "none",
    num_draft_tokens: int | str = 4,
    verifier: str = "token",
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    max_new_tokens: int | Sequence[int] = 128,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] | Sequence[Sequence[str]] = (),
    eos_token_ids: int | Sequence[int] | None = None,
    logprobs: bool = False,
    observe: Callable[[Emitted], None] | None = None,
    trace: Trace | None = None,
) -> list[Completion]:
    """Decode one prompt or many together; the output is the trunk's own, whatever the drafter.

    prompts: text, token ids or chat messages, one or a list of them. drafter: a name in decoding.drafters or
    a Drafter. num_draft_tokens: a number or "auto". sampling, max_new_tokens, stop: one for all or one a row.
    Row r of an integer seed s has seed s + r. eos_token_ids: None is the network's own, () none. observe is
    called with what every step emitted, trace with all that it came from. UserError for what a user got
    wrong.
    """
    if num_draft_tokens != "auto":
        check_whole("num_draft_tokens", num_draft_tokens, 0)
    check_verifier(verifier)
    many = as_list(prompts)
    if not many:
        raise UserError("prompts is an empty list; at least one prompt is needed")
    eos, device = check_eos(network, eos_token_ids), network.trunk.device
    columns = (
        many,
        per_row("sampling", sampling, len(many)),
        per_row("seed", seed, len(many), next_seed),
        per_row("max_new_tokens", max_new_tokens, len(many)),
        per_row("stop", stop, len(many)) if is_nested(stop) else [stop] * len(many),
    )
    rows = [
        new_row(network, device, eos, index, *values)
        for index, values in enumerate(zip(*columns, strict=True))
    ]
    for row in rows:
        row.logprobs = [] if logprobs else None
    built = build_drafter(network, drafter) if isinstance(drafter, str) else drafter
    decode(network, rows, built, policy(num_draft_tokens, built), VERIFIERS[verifier], observe, trace)
    return [row.completion() for row in rows]


def new_row(
    network: Network,
    device: torch.device,
    eos: tuple[int, ...],
    index: int,
    prompt: PromptLike,
    sampling: Sampling,
    seed: int,
    max_new_tokens: int,
    stop: Any,
) -> Row:
    """One prompt with its settings, all checked."""
    check_whole("max_new_tokens", max_new_tokens, 0)
    check_whole("seed", seed, -SEEDS, 2 * SEEDS - 1)
    tokenizer, text = network.tokenizer, read_prompt(network, prompt)
    room = network.trunk.context - len(text.ids)
    limits = Limits(min(max_new_tokens, room), room < max_new_tokens, eos, check_stop(stop, tokenizer))
    rules = processors(
        sampling,
        prompt_length=len(text.ids),
        eos_token_ids=eos,
        tokenizer=tokenizer,
        device=device,
    )
    return Row(index, text, sampling, seed, Output(text.ids, limits, tokenizer), rules)


@torch.inference_mode()
def decode(
    network: Network,
    rows: list[Row],
    drafter: Drafter,
    length: Policy,
    verifier: Verifier,
    observe: Callable[[Emitted], None] | None = None,
    trace: Trace | None = None,
) -> None:
    """Run rows, all together, to their ends; results stand in the rows."""
    began = time.perf_counter()
    rows = [row for row in rows if row.output.finish_reason is None]
    if not rows:
        return
    trunk, logprobs = network.trunk, rows[0].logprobs is not None
    cache = KVCache(len(rows), trunk.device)
    drafter.reset(len(rows), cache)
    root = prefill(network, rows, drafter, cache)
    sampling, seeds = settings(network, rows)
    step = 0
    while rows:
        step_began = time.perf_counter()
        asked = length.ask([row.index for row in rows])
        room = [min(row.room(), most) for row, most in zip(rows, asked, strict=True)]
        context = StepContext(
            sampling, seeds, room, step, length.most,
            texts=texts(rows, verifier), rules=[row.rules for row in rows], coupled=verifier.coupled,
        )  # fmt: skip
        draft = drafter.propose(root, length.most, context)
        parents = draft.parents.cpu()
        if not (verifier.trees or is_chain(parents)):
            raise UserError(
                "verifier=block tests chains, but the drafter drafts a tree; traversal is block for trees"
            )
        nodes = torch.cat([root[:, None], draft.tokens], dim=1)
        window = cache.open(nodes.shape[1], parents=parents)
        out = trunk(
            nodes, positions=window.positions, mask=window.mask, cache=cache,
            start=draft.exit_layer, states=draft.states, taps=drafter.taps,
        )  # fmt: skip
        p = context.laws(out.logits, draft)
        verdict = verifier.verify(p, draft, context.uniforms(draft))
        host = torch.cat([nodes[:, 1:], verdict.next_token[:, None], verdict.accepted], dim=1).cpu()
        tokens, keep = host[:, : nodes.shape[1]], host[:, nodes.shape[1] :].bool()
        cache.commit(keep)
        drafter.extend(nodes, out.states, keep)
        root = verdict.next_token
        going = emit(rows, tokens, keep, parents, out.logits if logprobs else None, observe)
        if trace is not None:
            trace(rows, draft, p, out.logits, verdict)
        now = time.perf_counter()
        length.took(height(parents), now - step_began)
        for row in rows:
            row.seconds = now - began
            length.learn(row.index, *row.last_step)
        if len(going) < len(rows):
            rows = [rows[index] for index in going]
            if rows:
                index = torch.tensor(going)
                cache.select(index)
                drafter.select(index)
                root = root[index.to(root.device)]
                sampling, seeds = settings(network, rows)
        step += 1


def prefill(network: Network, rows: list[Row], drafter: Drafter, cache: KVCache) -> Tensor:
    """Run every prompt without its last token, which becomes the first root [B]; shorter rows are padded.

    The padding lies behind each row's own tokens, so nothing that counts can see it.
    """
    device = network.trunk.device
    lengths = torch.tensor([len(row.prompt.ids) - 1 for row in rows])
    width = int(lengths.max())
    if width:
        padded = [row.prompt.ids[:-1] + [0] * (width - len(row.prompt.ids) + 1) for row in rows]
        tokens = torch.tensor(padded, device=device)
        window = cache.open(width)
        out = network.trunk(
            tokens, positions=window.positions, mask=window.mask, cache=cache, taps=drafter.taps, logits=False
        )
        keep = torch.arange(width) < lengths[:, None]
        cache.commit(keep)
        drafter.extend(tokens, out.states, keep)
    return torch.tensor([row.prompt.ids[-1] for row in rows], device=device)


def texts(rows: list[Row], verifier: Verifier) -> list[list[int]]:
    """Every row's tokens, where a processor or the coupling's positions need them."""
    needed = verifier.coupled or any(row.rules for row in rows)
    return [row.text() for row in rows] if needed else []


def settings(network: Network, rows: list[Row]) -> tuple[RowSampling, Tensor]:
    device = network.trunk.device
    sampling = RowSampling.stack([row.sampling for row in rows], network.trunk.vocab_size, device)
    return sampling, torch.tensor([row.seed for row in rows], dtype=torch.long, device=device)


def build_drafter(network: Network, name: str, **options: Any) -> Drafter:
    """A name is a module: "sequential" is built by decoding.drafters.sequential.build."""
    if name not in drafter_names():
        raise UserError(f"drafter={name!r} is not one of {', '.join(drafter_names())}")
    return importlib.import_module(f"decoding.drafters.{name}").build(network, **options)


def drafter_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(decoding.drafters.__path__))


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> many: a text, a list of ids and a list of messages are one prompt each."""
    single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], (int, dict)))
    return [prompts] if single else list(prompts)


def is_nested(values: Any) -> bool:
    """Whether a list holds lists: one a row."""
    return not isinstance(values, str) and any(isinstance(value, (list, tuple)) for value in values)


def per_row(
    name: str, value: Any, count: int, spread: Callable[[Any, int], Any] = lambda v, _: v
) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [spread(value, row) for row in range(count)]
    if len(value) != count:
        raise UserError(f"{name}: {len(value)} values for {count} prompts; give one for all or one for each")
    return list(value)


def check_verifier(name: object) -> None:
    if not isinstance(name, str) or name not in VERIFIERS:
        raise UserError(f"verifier={name!r} is not one of {', '.join(VERIFIERS)}")


def next_seed(seed: Any, row: int) -> Any:
    return seed + row if isinstance(seed, int) else seed  # anything else is refused by its row


def check_eos(network: Network, eos_token_ids: Any) -> tuple[int, ...]:
    """The ids at which a row ends: the network's own where None is given."""
    if eos_token_ids is None:
        generation = getattr(network.trunk.model, "generation_config", None)
        eos_token_ids = getattr(generation, "eos_token_id", None)
        if eos_token_ids is None:
            eos_token_ids = network.trunk.config.eos_token_id
    if eos_token_ids is None:
        return ()
    ids = eos_token_ids if isinstance(eos_token_ids, (list, tuple)) else [eos_token_ids]
    for token in ids:
        check_whole("eos_token_ids", token, 0)
    return tuple(ids)
