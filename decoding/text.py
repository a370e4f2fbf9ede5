"""Text of a growing list of token ids, piece by piece, never half a character and never one twice."""

from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are not (yet) a character
LEAD = 6  # prompt tokens decoded along, so that word boundaries come out as they do in the whole text


class Detokenizer:
    """Feed token ids, get the text that has become certain. `text` is everything handed out so far."""

    def __init__(self, tokenizer: Any, prompt_ids: list[int]):
        self.tokenizer = tokenizer
        self.ids = list(prompt_ids[-LEAD:])
        self.known = len(self.ids)  # ids whose text has been handed out completely
        self.start = 0  # ids before this one no longer matter
        self.shown = 0  # characters handed out of what lies beyond `known`
        self.text = ""

    def push(self, *tokens: int) -> str:
        """Many tokens at once are read in one go, as cheaply as one."""
        self.ids += tokens
        return self._advance(final=False)

    def flush(self) -> str:
        """The rest: bytes that never became a character come out as the decoder writes them."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        known = len(self._decode(self.ids[self.start : self.known]))
        whole = self._decode(self.ids[self.start :])
        certain = whole if final else whole.rstrip(REPLACEMENT)
        piece = certain[known + self.shown :]
        self.shown += len(piece)
        if len(certain) == len(whole):  # never inside a character, one that the prompt began included
            self.start, self.known, self.shown = self.known, len(self.ids), 0
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
