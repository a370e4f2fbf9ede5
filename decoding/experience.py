"""What drafts came to: in one text, and in the texts before it, from which a new one starts."""

from collections import deque
from dataclasses import dataclass, field

PRIOR, PRIOR_WEIGHT = 0.8, 5.0  # acceptance at depth 1 before any test, and for how many tests it counts
MEMORY = 0.95  # weight of the tests before, each time a depth is tested
TEXTS = 32  # so many of the last texts are what a new one starts from
# What steps that draft may cost beyond the tokens that they bring, in plain steps: for every token, and once.
LOSS, CREDIT = 0.02, 2.0


@dataclass(slots=True)
class Record:
    """What one row's drafts came to, recent ones counting more."""

    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    doubt: list[float] = field(default_factory=list)  # what the guess before any test still counts for
    prior: list[float] = field(default_factory=list)  # acceptance by depth in other texts
    idle: int = 0  # plain steps since the last draft
    patience: int = 0  # plain steps before a probe
    best: int | None = None  # the length that this comes to; None: to be found

    def count(self, reached: list[float]) -> None:
        """Depth k was reached with chance reached[k-1], so depth k+1 was tested with that chance.

        >>> record = Record(); record.count([0.5, 0.25]); record.tested, record.accepted
        ([1.0, 0.5], [0.5, 0.25])
        """
        self.best = None
        missing = len(reached) - len(self.tested)
        self.tested += [0.0] * missing
        self.accepted += [0.0] * missing
        self.doubt += [PRIOR_WEIGHT] * missing
        for depth, (before, now) in enumerate(zip([1.0, *reached], reached, strict=False)):
            kept = MEMORY**before
            self.tested[depth] = kept * self.tested[depth] + before
            self.accepted[depth] = kept * self.accepted[depth] + now
            self.doubt[depth] *= kept

    def rates(self, depth: int, hope: float = 0.0) -> list[float]:
        """Estimated acceptance of depths 1 ... depth.

        Before its tests a depth is taken to be like the one before it, or as in other texts if that is worse:
        deep drafts are tested where drafting goes well, so what they came to elsewhere is too good.
        hope: so many standard deviations of the estimate, a Beta law's, are added to the first depth, and
        to others where they were tested.

        >>> Record([8.0], [6.0], [1.0]).rates(2)
        [0.7555555555555555, 0.7555555555555555]
        >>> [round(rate, 3) for rate in Record([8.0], [6.0], [1.0]).rates(2, hope=1.0)]
        [0.891, 0.756]
        >>> Record(prior=[0.5, 0.9, 0.2]).rates(4)
        [0.5, 0.5, 0.2, 0.2]
        """
        found, rate = list[float](), self.prior[0] if self.prior else PRIOR
        for prior in self.prior[:depth] + [1.0] * (depth - len(self.prior)):
            rate, at, weight = min(rate, prior), len(found), PRIOR_WEIGHT
            tested = at < len(self.tested) and self.tested[at] > 0
            if tested:
                weight = self.tested[at] + self.doubt[at]
                rate = (self.accepted[at] + self.doubt[at] * rate) / weight
            hoped = tested or not at
            found.append(min(1.0, rate + hoped * hope * (rate * (1 - rate) / (weight + 1)) ** 0.5))
        return found


@dataclass(slots=True)
class Experience:
    """One drafter's texts so far, and what its drafts have earned in them together.

    `earned` is in plain steps: the tokens emitted less what the steps cost; a debt shrinks by LOSS for every
    token. As long as no step may cost more than that and CREDIT, drafting as a whole is never slower than
    plain decoding by more than LOSS and CREDIT, whatever is accepted (the constraint of conservative bandits,
    1602.04282); nor is any stretch of text, where drafting has earned nothing before.
    """

    records: deque[Record] = field(default_factory=lambda: deque(maxlen=TEXTS))
    earned: float = 0.0

    def begin(self, patience: int) -> Record:
        """A new text's record; what was waited for in the text before goes on."""
        record = Record(prior=self.prior(), patience=patience)
        if self.records:
            record.idle, record.patience = self.records[-1].idle, self.records[-1].patience
        self.records.append(record)
        return record

    def prior(self) -> list[float]:
        """Acceptance by depth in all texts together, recent tests of each counting more.

        >>> experience = Experience(); experience.begin(8).count([1.0, 0.0]); experience.begin(8).count([0.0])
        >>> [round(rate, 2) for rate in experience.prior()]
        [0.71, 0.6]
        """
        depths = max((len(record.tested) for record in self.records), default=0)
        found, rate = list[float](), PRIOR
        for depth in range(depths):
            deep = [record for record in self.records if depth < len(record.tested)]
            tested = sum(record.tested[depth] for record in deep)
            accepted = sum(record.accepted[depth] for record in deep)
            rate = (accepted + PRIOR_WEIGHT * rate) / (tested + PRIOR_WEIGHT)
            found.append(rate)
        return found

    def count(self, emitted: float, cost: float) -> None:
        """A step of one row emitted so many tokens for so many plain steps."""
        self.earned += emitted - cost
        if self.earned < 0:
            self.earned = min(0.0, self.earned + LOSS * emitted)

    def afforded(self, rows: int) -> float:
        """How many plain steps the next step of so many rows may cost more than one, each."""
        return self.earned / rows + CREDIT
