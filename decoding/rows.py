"""A prompt on its way through the loop, what each step gives it, and what it becomes.

Shapes: B rows, N draft nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.judge import Judged, Lines
from decoding.noise import SEEDS
from decoding.processors import Processor, processors
from decoding.prompts import Prompt, PromptLike, read_prompt
from decoding.sampling import Sampling
from decoding.stopping import Limits, Output, check_stop
from mtp import Network
from mtp.errors import check_whole


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt became.

    logprobs, where asked for, are the trunk's own log-probabilities of the emitted tokens: log-softmax of its
    logits, before temperature, filters and penalties.
    """

    prompt: str | None
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None  # None where the network has no tokenizer
    finish_reason: str  # "eos", "stop", "length" or "context"
    acceptance: Acceptance
    seconds: float
    logprobs: list[float] | None = None

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
    rules: list[Processor] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    seconds: float = 0.0
    logprobs: list[float] | None = None
    last_step: tuple[int, int, int] = (0, 0, 0)  # nodes drafted, depths tested and accepted

    def room(self) -> int:
        """Draft nodes that can still be of use: the step itself always emits one token more."""
        return self.output.limits.max_new_tokens - len(self.output.token_ids) - 1

    def text(self) -> list[int]:
        """All tokens up to and including the root."""
        return self.prompt.ids + self.output.token_ids

    @property
    def length(self) -> int:
        """How many these are."""
        return len(self.prompt.ids) + len(self.output.token_ids)

    def completion(self) -> Completion:
        output = self.output
        assert output.finish_reason is not None
        return Completion(
            prompt=self.prompt.text,
            prompt_ids=self.prompt.ids,
            token_ids=output.token_ids,
            text=output.text,
            finish_reason=output.finish_reason,
            acceptance=self.acceptance,
            seconds=self.seconds,
            logprobs=self.logprobs,
        )


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


def emit(
    rows: list[Row],
    judged: Judged,
    parents: Lines,
    logits: Tensor | None,
    observe: Callable[[Emitted], None] | None,
) -> list[int]:
    """Give every row its new tokens: those of accepted nodes, then the next token. Returns the rows that go
    on.

    parents [B][N] are the draft's; logits [B, N+1, V] where log-probabilities are asked for.
    """
    going = []
    for index, (row, path, new, hangs) in enumerate(
        zip(rows, judged.paths, judged.tokens, parents, strict=True)
    ):
        pieces = None if observe is None else push(row.output, new)
        used = row.output.extend(new) if pieces is None else len(pieces)
        accepted = len(path) - 1
        drafted, tested = sum(parent >= 0 for parent in hangs), accepted + (path[-1] in hangs)
        row.last_step = (drafted, tested, accepted)
        row.acceptance.count(drafted=drafted, tested=tested, accepted=accepted, emitted=used)
        if logits is not None and row.logprobs is not None:
            values = logits[index, path[:used]].float().log_softmax(-1)
            row.logprobs += [values[i, new[i]].item() for i in range(used)]
        if observe is not None and pieces is not None:
            observe(Emitted(row.index, new[:used], pieces, min(accepted, used)))
        if row.output.finish_reason is None:
            going.append(index)
    return going


def push(output: Output, tokens: list[int]) -> list[str]:
    """Append tokens up to the one that ends the output; the text that each of them made certain."""
    pieces = []
    for token in tokens:
        ended = output.push(token)
        pieces.append(output.new_text())
        if ended:
            break
    return pieces
