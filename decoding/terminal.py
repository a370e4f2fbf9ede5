"""Text on a terminal as it is decoded: accepted draft tokens look different from the trunk's own."""

import sys
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from decoding.prompts import PromptLike
from decoding.rows import Completion, Emitted

PROMPT = Style(dim=True)
ACCEPTED = Style(color="green", bold=True)


class Terminal:
    """Prints prompt and completion; colours only where the stream is a terminal."""

    def __init__(self, file: TextIO = sys.stdout, *, stream: bool = True):
        if hasattr(file, "reconfigure"):
            file.reconfigure(errors="backslashreplace")  # a terminal that knows no such character
        self.console = Console(file=file, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.stream = stream

    def begin(self, prompt: PromptLike, tokenizer: Any) -> None:
        if self.stream and isinstance(prompt, str):
            self._print(prompt, PROMPT)

    def show(self, emitted: Emitted) -> None:
        """What one step brought, piece by piece."""
        for index, piece in enumerate(emitted.pieces):
            self._print(piece, ACCEPTED if index < emitted.drafted else None)
        self.console.file.flush()

    def end(self, completions: list[Completion]) -> None:
        """Close the streamed text, or print whole ones."""
        if not self.stream:
            for completion in completions:
                self._print(completion.prompt or "", PROMPT)
                self._print(shown(completion), None)
                self.console.print()
        elif completions[0].text is None:
            self._print(shown(completions[0]), None)
        self.console.print()

    def _print(self, text: str, style: Style | None) -> None:
        self.console.print(Segments([Segment(text, style)]), end="")  # a Text would lose tabs and returns


def shown(completion: Completion) -> str:
    """The text, or the ids of a network without a tokenizer."""
    return " ".join(map(str, completion.token_ids)) if completion.text is None else completion.text
