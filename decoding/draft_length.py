"""How many tokens are worth drafting now: a fixed number, or what measured acceptance and cost say.

Drafting g tokens is worth (1 + a_1 + a_1 a_2 + ... + a_1 ... a_g) / cost(g) tokens per second, where a_k is
how surely depth k was accepted lately, if k-1 was, and cost(g) the measured time of a step that drafts g. The
decision depends on the past only, never on what is drafted, so it cannot bias the output (design rule 6).
"""

from dataclasses import dataclass
from typing import Protocol

from decoding.experience import Experience, Record

CHOICES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
HOPE = 1.5  # standard deviations by which acceptance may be better than estimated when drafting is given up
GAIN = 1.07  # drafting must promise so much more than plain decoding
# Plain steps before a draft of one token is tried again: as many as make that cost PROBE_SHARE of them,
# within bounds; after every probe twice as many, but at most MORE_PATIENCE times.
PROBE_SHARE, PROBE_BOUNDS, MORE_PATIENCE = 0.004, (8, 256), 4


class Policy(Protocol):
    """Decides before every step how far each row drafts, and hears what came of it."""

    @property
    def most(self) -> int:
        """The longest draft it will ever ask for."""

    def ask(self, rows: list[int]) -> list[int]:
        """Draft lengths for these rows (numbers of prompts)."""

    @property
    def learns(self) -> bool:
        """Whether it wants to hear."""

    def learn(self, row: int, drafted: int, reached: list[float]) -> None:
        """A step of this row drafted so far and was accepted as far as depth k with chance reached[k-1],
        given its tokens."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The same length always."""

    most: int
    learns = False

    def ask(self, rows: list[int]) -> list[int]:
        return [self.most] * len(rows)

    def learn(self, row: int, drafted: int, reached: list[float]) -> None:
        pass


class Costs:
    """Seconds of a step by the number of tokens drafted; between and beyond what was measured, straight
    lines.

    Of several steps of one length the lower quartile counts: what else a machine does only adds, and by the
    one shortest step two lengths are compared by luck.
    """

    def __init__(self) -> None:
        self.measured: dict[int, list[float]] = {}  # in order

    def add(self, drafted: int, *seconds: float) -> None:
        self.measured[drafted] = sorted([*self.measured.get(drafted, ()), *seconds])

    def join(self, other: "Costs") -> None:
        """What was measured in another turn."""
        for drafted, seconds in other.measured.items():
            self.add(drafted, *seconds)

    @property
    def times(self) -> dict[int, float]:
        """
        >>> costs = Costs(); costs.add(0, 5.0, 1.0, 2.0, 4.0, 3.0); costs.times
        {0: 2.0}
        """
        return {drafted: seconds[(len(seconds) - 1) // 4] for drafted, seconds in self.measured.items()}

    def __call__(self, drafted: int) -> float:
        """One length at least must have been measured, two for others than that.

        >>> costs = Costs(); costs.add(0, 1.0); costs.add(4, 2.0); costs(0), costs(2), costs(8)
        (1.0, 1.5, 3.0)
        """
        points = sorted(self.times.items())
        below = [point for point in points if point[0] <= drafted] or points[:1]
        above = [point for point in points if point[0] >= drafted]
        (x0, y0), (x1, y1) = (below[-1], above[0]) if above else points[-2:]
        if x0 == x1 or (not above and y1 < y0):
            return y1
        return y0 + (y1 - y0) * (drafted - x0) / (x1 - x0)


class AutoLength:
    """The length with the best expected tokens per second, row by row, as far as it can be afforded; 0 is an
    answer, with a rare probe."""

    most = CHOICES[-1]
    learns = True

    def __init__(self, costs: Costs, experience: Experience | None = None):
        seconds = [costs(drafted) for drafted in range(self.most + 1)]
        self.prices = [one / seconds[0] for one in seconds]  # in plain steps
        least, most = PROBE_BOUNDS
        self.patience = round(min(max((self.prices[1] - 1) / PROBE_SHARE, least), most))
        self.experience = Experience() if experience is None else experience
        self.records: dict[int, Record] = {}

    def ask(self, rows: list[int]) -> list[int]:
        allowed = self._allowed(self.experience.afforded(len(rows)))
        return [self._choose(self._record(row), allowed) for row in rows]

    def _allowed(self, afforded: float) -> int:
        """The longest draft that costs no more."""
        return next((n for n in reversed(CHOICES) if self.prices[n] - 1 <= afforded), 0)

    def _record(self, row: int) -> Record:
        if row not in self.records:
            self.records[row] = self.experience.begin(self.patience)
        return self.records[row]

    def _choose(self, record: Record, allowed: int) -> int:
        if record.best is None:
            record.best = self._best(record)
        if record.best:
            record.idle = 0
        else:
            record.idle += 1
            if allowed and record.idle > record.patience:
                record.idle, record.patience = 0, min(2 * record.patience, MORE_PATIENCE * self.patience)
                return 1
        return min(record.best, allowed)

    def _best(self, record: Record) -> int:
        """What pays by the estimate; else what would if acceptance were as good as may be hoped."""
        return self._fastest(record.rates(self.most)) or self._fastest(record.rates(self.most, HOPE))

    def _fastest(self, rates: list[float]) -> int:
        best, speed, expected, reach = 0, GAIN, 1.0, 1.0
        for depth, rate in enumerate(rates, start=1):
            reach *= rate
            expected += reach
            if depth in CHOICES and expected / self.prices[depth] > speed:
                best, speed = depth, expected / self.prices[depth]
        return best

    def learn(self, row: int, drafted: int, reached: list[float]) -> None:
        self.experience.count(1 + sum(reached), self.prices[min(drafted, self.most)])
        if reached:
            record = self._record(row)
            record.count(reached)
            if reached[0] > 0.5:  # if that was a probe, the next step is one too
                record.idle = record.patience = self.patience
