"""Where a row's output ends: EOS, stop strings, limits. The same token cuts ids, text and stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoding.text import Detokenizer
from mtp.errors import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop. `max_new_tokens` may already be cut to what the context leaves (`context_bound`)."""

    max_new_tokens: int
    context_bound: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    criteria: tuple[Callable[[list[int]], bool], ...] = ()  # each is asked about prompt and output so far


class Output:
    """The emitted tokens of one row and their text; `push` says when it is over.

    Text is read when somebody asks for it: token by token for stop strings and streams, else once at the end.
    """

    def __init__(self, prompt_ids: list[int], limits: Limits, tokenizer: Any):
        self.limits, self.prompt_ids = limits, prompt_ids
        self.token_ids: list[int] = []
        self.finish_reason: str | None = "length" if limits.max_new_tokens == 0 else None
        self.detokenizer = Detokenizer(tokenizer, prompt_ids) if tokenizer is not None else None
        self.read = 0  # tokens that the detokenizer has
        self.streamed = 0
        self.cut: str | None = None  # the text, where a stop string rather than the last token ends it

    @property
    def text(self) -> str | None:
        """All that has become certain; None without a tokenizer."""
        if self.detokenizer is None or self.cut is not None:
            return self.cut
        self._read(self.detokenizer)
        if self.finish_reason:
            self.detokenizer.flush()
        return self.detokenizer.text

    def _read(self, detokenizer: Detokenizer) -> None:
        if self.read < len(self.token_ids):
            detokenizer.push(*self.token_ids[self.read :])
            self.read = len(self.token_ids)

    def push(self, token: int) -> bool:
        """Append one token; True when the output ends with it."""
        self.token_ids.append(token)
        self.finish_reason = self._reason(token)
        return self.finish_reason is not None

    def extend(self, tokens: list[int]) -> int:
        """Append tokens up to the one that ends the output; how many that were."""
        return next((count for count, token in enumerate(tokens, start=1) if self.push(token)), len(tokens))

    def _reason(self, token: int) -> str | None:
        if token in self.limits.eos_token_ids:
            return "eos"
        if self.limits.stop and self._cut_at_stop():
            return "stop"
        if any(met(self.prompt_ids + self.token_ids) for met in self.limits.criteria):
            return "stop"
        if len(self.token_ids) >= self.limits.max_new_tokens:
            return "context" if self.limits.context_bound else "length"
        return None

    def _cut_at_stop(self) -> bool:
        """End the text right after the stop string that is complete first, if the newest token completes
        one."""
        assert self.detokenizer is not None
        begin = max(0, len(self.detokenizer.text) - max(map(len, self.limits.stop)))
        self._read(self.detokenizer)
        text = self.detokenizer.text
        ends = [at + len(s) for s in self.limits.stop if (at := text.find(s, begin)) >= 0]
        if ends:
            self.cut = text[: min(ends)]
        return bool(ends)

    def new_text(self) -> str:
        """What can be shown and has not been. The text keeps its stop string, so nothing has to wait for
        one."""
        text = self.text
        if text is None:
            return ""
        piece = text[self.streamed :]
        self.streamed = len(text)
        return piece


def check_stop(stop: Any, tokenizer: Any) -> tuple[str, ...]:
    """The stop strings of a user as a tuple; UserError where one is empty or there is no tokenizer to read
    text."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UserError(f"stop={string!r} is not a text of at least one character")
    if strings and tokenizer is None:
        raise UserError(
            "stop: this network has no tokenizer, so there is no text to stop at; use eos_token_ids"
        )
    return strings
