"""The one loop: prefill, propose, score, verify, commit. Plain decoding is the same loop with no drafts.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache import KVCache
from decoding.context import StepContext
from decoding.draft import Draft, Drafter, Verdict
from decoding.prompts import Prompt, PromptLike, read_prompt
from decoding.sampling import RowSampling, Sampling
from decoding.stopping import Limits, Output, check_stop
from decoding.verify import verify_block, verify_token
from mtp import Network, UserError

GREEDY = Sampling()
VERIFIERS: dict[str, Callable[[Tensor, Draft, Tensor], Verdict]] = {
    "token": verify_token,
    "block": verify_block,
}


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt became."""

    prompt: str | None
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None  # None where the network has no tokenizer
    finish_reason: str  # "eos", "stop", "length" or "context"
    acceptance: Acceptance
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one step gave one row: the first `drafted` tokens are accepted drafts, the rest is the trunk's
    own.

    pieces[i] is the text that became certain with tokens[i]: empty inside a character, and without a
    tokenizer.
    """

    row: int
    tokens: list[int]
    pieces: list[str]
    drafted: int


@dataclass(slots=True)
class Row:
    """One prompt on its way."""

    index: int
    prompt: Prompt
    sampling: Sampling
    seed: int
    output: Output
    acceptance: Acceptance = field(default_factory=Acceptance)
    seconds: float = 0.0

    def room(self) -> int:
        """Draft nodes that can still be of use: the step itself always emits one token more."""
        return self.output.limits.max_new_tokens - len(self.output.token_ids) - 1

    def completion(self) -> Completion:
        output = self.output
        assert output.finish_reason is not None
        return Completion(
            self.prompt.text, self.prompt.ids, output.token_ids, output.text, output.finish_reason,
            self.acceptance, self.seconds,
        )  # fmt: skip


def generate(
    network: Network,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    drafter: str | Drafter = "none",
    num_draft_tokens: int = 4,
    verifier: str = "token",
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    max_new_tokens: int | Sequence[int] = 128,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    eos_token_ids: int | Sequence[int] | None = None,
    observe: Callable[[Emitted], None] | None = None,
) -> list[Completion]:
    """Decode one prompt or many together; the output is the trunk's own, whatever the drafter.

    prompts: text, token ids or chat messages, one or a list of them. drafter: a name in decoding.drafters or
    a Drafter. sampling, max_new_tokens: one for all or one a row. Row r of an integer seed s has seed s + r.
    eos_token_ids: None is the network's own, () none. observe is called with what every step emitted.
    UserError for what a user got wrong.
    """
    check_whole("num_draft_tokens", num_draft_tokens, 0)
    if verifier not in VERIFIERS:
        raise UserError(f"verifier={verifier!r} is not one of {', '.join(VERIFIERS)}")
    texts = [read_prompt(network, prompt) for prompt in as_list(prompts)]
    if not texts:
        raise UserError("prompts is an empty list; at least one prompt is needed")
    samplings = per_row("sampling", sampling, len(texts), lambda s, _: s)
    seeds = per_row("seed", seed, len(texts), lambda s, r: s + r)
    lengths = per_row("max_new_tokens", max_new_tokens, len(texts), lambda n, _: n)
    stops = check_stop(stop, network.tokenizer)
    ends = check_eos(network, eos_token_ids)
    rows = []
    for index, text in enumerate(texts):
        check_whole("max_new_tokens", lengths[index], 0)
        room = network.trunk.context - len(text.ids)
        limits = Limits(min(lengths[index], room), room < lengths[index], ends, stops)
        rows.append(
            Row(index, text, samplings[index], seeds[index], Output(text.ids, limits, network.tokenizer))
        )
    built = build_drafter(network, drafter) if isinstance(drafter, str) else drafter
    decode(network, rows, built, num_draft_tokens, VERIFIERS[verifier], observe)
    return [row.completion() for row in rows]


@torch.inference_mode()
def decode(
    network: Network,
    rows: list[Row],
    drafter: Drafter,
    num_draft_tokens: int,
    verify: Callable[[Tensor, Draft, Tensor], Verdict],
    observe: Callable[[Emitted], None] | None = None,
) -> None:
    """Run rows, all together, to their ends; results stand in the rows."""
    began = time.perf_counter()
    rows = [row for row in rows if row.output.finish_reason is None]
    if not rows:
        return
    trunk = network.trunk
    cache = KVCache(len(rows), trunk.device)
    drafter.reset(len(rows), cache)
    root = prefill(network, rows, drafter, cache)
    sampling, seeds = settings(network, rows)
    step = 0
    while rows:
        context = StepContext(sampling, seeds, [row.room() for row in rows], step, num_draft_tokens)
        draft = drafter.propose(root, num_draft_tokens, context)
        parents = draft.parents.cpu()
        nodes = torch.cat([root[:, None], draft.tokens], dim=1)
        window = cache.open(nodes.shape[1], parents=parents)
        out = trunk(
            nodes, positions=window.positions, mask=window.mask, cache=cache,
            start=draft.exit_layer, states=draft.states, taps=drafter.taps,
        )  # fmt: skip
        verdict = verify(context.laws(out.logits, draft), draft, context.uniforms(draft))
        emitted = torch.cat([nodes[:, 1:], verdict.next_token[:, None], verdict.accepted], dim=1).cpu()
        tokens, keep = emitted[:, : nodes.shape[1]], emitted[:, nodes.shape[1] :].bool()
        cache.commit(keep)
        drafter.extend(nodes, out.states, keep)
        root = verdict.next_token
        going = emit(rows, tokens, keep, parents, observe)
        for row in rows:
            row.seconds = time.perf_counter() - began
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
    """Run every prompt without its last token, which becomes the first root [B]; shorter rows are padded on
    the right.

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


def emit(
    rows: list[Row], tokens: Tensor, keep: Tensor, parents: Tensor, observe: Callable[[Emitted], None] | None
) -> list[int]:
    """Give every row its new tokens: those of accepted nodes, then the next token. Returns the rows that go
    on.

    tokens [B, N+1] are the draft tokens and the next token; keep [B, N+1] the accepted nodes, the root first.
    """
    going = []
    for index, row in enumerate(rows):
        path = [node for node, kept in enumerate(keep[index].tolist()) if kept]
        line = tokens[index].tolist()
        new = [line[node - 1] for node in path[1:]] + [line[-1]]
        used, pieces = push(row.output, new)
        accepted, hangs = len(path) - 1, parents[index].tolist()
        row.acceptance.count(
            drafted=sum(parent >= 0 for parent in hangs),
            tested=accepted + (path[-1] in hangs),
            accepted=accepted,
            emitted=used,
        )
        if observe is not None:
            observe(Emitted(row.index, new[:used], pieces, min(accepted, used)))
        if row.output.finish_reason is None:
            going.append(index)
    return going


def push(output: Output, tokens: list[int]) -> tuple[int, list[str]]:
    """Append tokens up to the one that ends the output: how many were used, and the text each made
    certain."""
    pieces = []
    for token in tokens:
        ended = output.push(token)
        pieces.append(output.new_text())
        if ended:
            break
    return len(pieces), pieces


def settings(network: Network, rows: list[Row]) -> tuple[RowSampling, Tensor]:
    device = network.trunk.device
    sampling = RowSampling.stack([row.sampling for row in rows], network.trunk.vocab_size, device)
    return sampling, torch.tensor([row.seed for row in rows], dtype=torch.long, device=device)


def build_drafter(network: Network, name: str, **options: Any) -> Drafter:
    """A name is a module: "sequential" is built by decoding.drafters.sequential.build."""
    try:
        module = importlib.import_module(f"decoding.drafters.{name}")
    except (ModuleNotFoundError, ValueError):
        raise UserError(f"drafter={name!r} is not one of {', '.join(drafter_names())}") from None
    return module.build(network, **options)


def drafter_names() -> list[str]:
    import pkgutil

    import decoding.drafters

    return sorted(module.name for module in pkgutil.iter_modules(decoding.drafters.__path__))


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> many: a text, a list of ids and a list of messages are one prompt each."""
    single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], (int, dict)))
    return [prompts] if single else list(prompts)


def per_row(name: str, value: Any, count: int, spread: Callable[[Any, int], Any]) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [spread(value, row) for row in range(count)]
    if len(value) != count:
        raise UserError(f"{name}: {len(value)} values for {count} prompts; give one for all or one for each")
    return list(value)


def check_whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{name}={value!r} is not a whole number of at least {low}")


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
