"""Suffix decoding: draft what mostly followed the longest match, in this text or in an earlier output."""

from torch import Tensor

from decoding.cache import KVCache
from decoding.draft import Context, Draft, looked_up
from decoding.sampling import check_number
from decoding.suffix_index import START, Rule, SuffixIndex
from mtp import Network
from mtp.errors import check_whole


class Line:
    """One row's text, its own index, and where its end stands in the indices of earlier outputs."""

    def __init__(self, depth: int, earlier: list[SuffixIndex]):
        self.index, self.earlier = SuffixIndex(depth), earlier
        self.places = [START for _ in earlier]
        self.text: list[int] = []
        self.start: int | None = None  # position of the prompt's last token: the first root

    def append(self, token: int) -> None:
        self.text.append(token)
        self.index.append(token)
        self.places = [
            index.advance(place, token) for index, place in zip(self.earlier, self.places, strict=True)
        ]

    def continuation(self, root: int, count: int, rule: Rule) -> list[int]:
        """The draft with the largest expectation; among equals the row's own text comes first."""
        best: tuple[list[int], float] = ([], 0.0)
        ends = [self.index.end, *self.places]
        for index, end in zip([self.index, *self.earlier], ends, strict=True):
            found = index.continuation(index.advance(end, root), count, rule)
            best = found if found[1] > best[1] else best
        return best[0]


class Suffix:
    """SuffixDecoding (arXiv 2411.04975) with one path: what mostly followed, as far as match and counts say.

    Outputs are remembered for later calls. They enter at the next reset, so that rows of one batch do not
    depend on each other, and are forgotten in halves: when the newer half is full, the older one goes.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, rule: Rule, *, depth: int, global_tokens: int):
        self.rule, self.depth, self.half = rule, depth, global_tokens // 2
        self.earlier: list[SuffixIndex] = []  # the newer half first
        self.lines: list[Line] = []
        self.finished: list[Line] = []

    def __copy__(self) -> "Suffix":
        return Suffix(self.rule, depth=self.depth, global_tokens=2 * self.half)

    def reset(self, batch_size: int, cache: KVCache) -> None:
        for line in [*self.finished, *self.lines]:
            self._remember(line)
        self.finished = []
        self.lines = [Line(self.depth, self.earlier) for _ in range(batch_size)]

    def _remember(self, line: Line) -> None:
        output = [] if line.start is None else line.text[line.start :][: self.half]
        if len(output) < 2:
            return
        if not self.earlier or self.earlier[0].size + len(output) > self.half:
            self.earlier = [SuffixIndex(self.depth), *self.earlier][:2]
        self.earlier[0].begin()
        for token in output:
            self.earlier[0].append(token)

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        for line, row, kept in zip(self.lines, tokens.tolist(), keep.tolist(), strict=True):
            for token, true in zip(row, kept, strict=True):
                if true:
                    line.append(token)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        found = []
        for line, token, room in zip(self.lines, root.tolist(), context.room, strict=True):
            line.start = len(line.text) if line.start is None else line.start
            found.append(line.continuation(token, min(num_draft_tokens, room), self.rule))
        return looked_up(found, root)

    def select(self, rows: Tensor) -> None:
        going = rows.tolist()
        self.finished += [line for row, line in enumerate(self.lines) if row not in going]
        self.lines = [self.lines[row] for row in going]


def build(
    network: Network,
    depth: int = 64,
    factor: float = 1.0,
    offset: float = 0.0,
    min_token_prob: float = 0.1,
    min_match: int = 1,
    global_tokens: int = 65536,
) -> Suffix:
    check_whole("drafter.depth", depth, 1)
    check_number("drafter.factor", factor, low=0.0)
    check_number("drafter.offset", offset, low=-1000.0)
    check_number("drafter.min_token_prob", min_token_prob, low=0.0, high=1.0)
    check_whole("drafter.min_match", min_match, 1)
    check_whole("drafter.global_tokens", global_tokens, 0)
    rule = Rule(factor, offset, min_token_prob, min_match)
    return Suffix(rule, depth=depth, global_tokens=global_tokens)
