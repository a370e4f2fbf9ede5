"""Lookup: when the last tokens stood in the text before, draft what followed them then."""

from torch import Tensor

from decoding.cache import KVCache
from decoding.draft import Context, Draft, looked_up
from mtp import Network, UserError


class NgramIndex:
    """Where each n-gram of a growing text was last followed by something; lookup and growth are O(1) a
    token."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.text: list[int] = []
        self.follower: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token behind it

    def append(self, token: int) -> None:
        position = len(self.text)
        for size in self.sizes:
            if size <= position:
                self.follower[tuple(self.text[position - size :])] = position
        self.text.append(token)

    def continuation(self, root: int, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known n-gram at the end of text + root, its latest
        place.

        Text 1 2 3 1 2, root 3: the 3-gram "1 2 3" stood at the start, so 1 2 is drafted, and 3, the root,
        after it.
        """
        line = [*self.text[-self.sizes.start :], root]
        for size in self.sizes:
            if size <= len(line) and (at := self.follower.get(tuple(line[-size:]))) is not None:
                return [*self.text[at : at + count], root][:count]
        return []


class Ngram:
    """Prompt-lookup decoding (Saxena 2023) with the longest and, among equals, the most recent match."""

    taps: tuple[int, ...] = ()

    def __init__(self, min_ngram: int, max_ngram: int):
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.indices: list[NgramIndex] = []

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.indices = [NgramIndex(self.min_ngram, self.max_ngram) for _ in range(batch_size)]

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        for index, line, kept in zip(self.indices, tokens.tolist(), keep.tolist(), strict=True):
            for token, true in zip(line, kept, strict=True):
                if true:
                    index.append(token)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        most = [max(0, min(num_draft_tokens, room)) for room in context.room]
        found = [
            index.continuation(token, count)
            for index, token, count in zip(self.indices, root.tolist(), most, strict=True)
        ]
        return looked_up(found, root)

    def select(self, rows: Tensor) -> None:
        self.indices = [self.indices[row] for row in rows.tolist()]


def build(network: Network, min_ngram: int = 1, max_ngram: int = 4) -> Ngram:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (min_ngram, max_ngram))
    if not whole or not 1 <= min_ngram <= max_ngram:
        raise UserError(
            f"min_ngram={min_ngram!r}, max_ngram={max_ngram!r}: whole numbers with 1 <= min <= max needed"
        )
    return Ngram(min_ngram, max_ngram)
