"""An index of text that knows, after any string seen before, what mostly followed and how often.

A state of a suffix automaton is a class of strings that end at the same places, so one state has one count
and one continuation. Its suffix link leads to the next shorter class.
"""

import math
from dataclasses import dataclass

NONE = -1
SLACK = 0.1  # tokens: no shorter match is tried for a smaller gain, or runs would be tried from end to end

Place = tuple[int, int]  # a string in an index: its state when it was found, and its number of tokens
START: Place = (0, 0)


@dataclass(frozen=True, slots=True)
class Rule:
    """How far a match of m tokens is trusted: factor * m + offset tokens, and not below min_token_prob."""

    factor: float
    offset: float
    min_token_prob: float
    min_match: int

    def most(self, match: int) -> int:
        return math.floor(self.factor * match + self.offset + 1e-6)  # 0.1 * 30 is three


class SuffixIndex:
    """A suffix automaton (Blumer et al. 1985) of lines of tokens that counts strings of up to depth+1 tokens.

    Growing takes amortised constant time for the automaton and at most `depth` links for the counts; there
    are at most two states a token. A string longer than `depth` stands for its last `depth` tokens.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.next: list[dict[int, int]] = []
        self.link: list[int] = []
        self.longest: list[int] = []  # tokens in the longest string of a state
        self.count: list[int] = []  # occurrences
        self.favourite: list[int] = []  # the token that followed most often, of equals the latest
        self.size = 0  # tokens
        self._state(0, {}, link=NONE, count=0, favourite=NONE)
        self.begin()

    def begin(self) -> None:
        """What is appended from here on is a line of its own."""
        self.last, self.end = 0, START

    def append(self, token: int) -> None:
        self.last = self._grown(token)
        end = self._settled(self.end)
        self._count(end[0], token)
        self.end = self.advance(end, token)
        self.size += 1

    def advance(self, place: Place, token: int) -> Place:
        """The longest known string that ends `place` + token."""
        state, length = self._settled(place)
        while token not in self.next[state]:
            if state == 0:
                return START
            state = self.link[state]
            length = self.longest[state]
        return self._settled((self.next[state][token], min(length + 1, self.depth)))

    def continuation(self, place: Place, count: int, rule: Rule) -> tuple[list[int], float]:
        """Up to `count` tokens after the string at `place` or an ending of it, and how many will come true.

        The ending with the largest expectation is followed, of equals the longest. A shorter one may draft
        less, so the search ends where none can do much better.
        """
        best: tuple[list[int], float] = ([], 0.0)
        state, length = self._settled(place)
        while length >= rule.min_match and state:
            most = min(count, rule.most(length))
            if most - best[1] < SLACK:
                break
            found = self._followed((state, length), most, rule.min_token_prob)
            best = found if found[1] > best[1] else best
            state = self.link[state]
            length = self.longest[state]
        return best

    def _followed(self, place: Place, most: int, least: float) -> tuple[list[int], float]:
        tokens: list[int] = []
        expected, probability = 0.0, 1.0
        while len(tokens) < most and (token := self.favourite[place[0]]) != NONE:
            after = self.next[place[0]][token]
            probability *= self.count[after] / self.count[place[0]]
            if probability < least:
                break
            tokens.append(token)
            expected += probability
            place = self.advance(place, token)
        return tokens, expected

    def _settled(self, place: Place) -> Place:
        """The same string after states were split: shorter strings move from a state to its link."""
        state, length = place
        while state and self.longest[self.link[state]] >= length:
            state = self.link[state]
        return state, length

    def _grown(self, token: int) -> int:
        """The state of the line so far + token, made if need be."""
        if token in self.next[self.last]:
            return self._exact(self.last, token)
        new = self._state(self.longest[self.last] + 1, {}, link=0, count=0, favourite=NONE)
        at = self.last
        while at != NONE and token not in self.next[at]:
            self.next[at][token] = new
            at = self.link[at]
        if at != NONE:
            self.link[new] = self._exact(at, token)
        return new

    def _exact(self, at: int, token: int) -> int:
        """The state whose longest string is that of `at` + token, split from a larger one if need be."""
        found = self.next[at][token]
        if self.longest[found] == self.longest[at] + 1:
            return found
        split = self._state(
            self.longest[at] + 1, dict(self.next[found]),
            link=self.link[found], count=self.count[found], favourite=self.favourite[found],
        )  # fmt: skip
        self.link[found] = split
        while at != NONE and self.next[at].get(token) == found:
            self.next[at][token] = split
            at = self.link[at]
        return split

    def _state(
        self, longest: int, following: dict[int, int], *, link: int, count: int, favourite: int
    ) -> int:
        self.longest.append(longest)
        self.next.append(following)
        self.link.append(link)
        self.count.append(count)
        self.favourite.append(favourite)
        return len(self.link) - 1

    def _count(self, at: int, token: int) -> None:
        """One more occurrence of `token` after every ending of the line, from the one at state `at` down."""
        counted = NONE
        while at != NONE:
            after = self.next[at][token]
            if after != counted:  # endings of several lengths may lead to one and the same state
                self.count[after] += 1
                counted = after
            favourite = self.favourite[at]
            if favourite == NONE or self.count[after] >= self.count[self.next[at][favourite]]:
                self.favourite[at] = token
            at = self.link[at]
