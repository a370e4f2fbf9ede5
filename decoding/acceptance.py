"""What was drafted, tested and accepted, counted step by step."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Acceptance:
    """Counts of one row. They end where its output ends: what was accepted behind an EOS is not counted.

    tau is emitted tokens per step, the token that the target itself supplies included (plain decoding:
    exactly 1). Depth k is tested when depth k-1 was accepted and depth k was drafted.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    tested_at_depth: list[int] = field(default_factory=list)
    accepted_at_depth: list[int] = field(default_factory=list)

    def count(self, *, drafted: int, tested: int, accepted: int, emitted: int) -> None:
        """One step: `drafted` nodes, depths 1 ... tested tested, 1 ... accepted accepted, `emitted` tokens
        used.

        Four drafted, three accepted, but the second emitted token is an EOS: depths 1 and 2 count, no more.

        >>> a = Acceptance(); a.count(drafted=4, tested=4, accepted=3, emitted=2); a.tested, a.accepted, a.tau
        (2, 2, 2.0)
        """
        self.steps += 1
        self.emitted += emitted
        self.drafted += drafted
        grow(self.tested_at_depth, min(tested, emitted))
        grow(self.accepted_at_depth, min(accepted, emitted))
        missing = len(self.tested_at_depth) - len(self.accepted_at_depth)
        self.accepted_at_depth += [0] * missing

    @property
    def tested(self) -> int:
        return sum(self.tested_at_depth)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at_depth)

    @property
    def tau(self) -> float | None:
        return self.emitted / self.steps if self.steps else None

    @property
    def alpha(self) -> float | None:
        """Accepted / tested; None where nothing was tested."""
        return self.accepted / self.tested if self.tested else None

    @property
    def conditional(self) -> list[float]:
        """Accepted / tested at each depth."""
        return [a / t for a, t in zip(self.accepted_at_depth, self.tested_at_depth, strict=True)]


def grow(counts: list[int], depth: int) -> None:
    """Add one to the first `depth` counts."""
    counts += [0] * (depth - len(counts))
    for index in range(depth):
        counts[index] += 1


def total(rows: list[Acceptance]) -> Acceptance:
    """The counts of several rows together."""
    result = Acceptance()
    for row in rows:
        result.steps += row.steps
        result.emitted += row.emitted
        result.drafted += row.drafted
        result.tested_at_depth = added(result.tested_at_depth, row.tested_at_depth)
        result.accepted_at_depth = added(result.accepted_at_depth, row.accepted_at_depth)
    return result


def added(a: list[int], b: list[int]) -> list[int]:
    length = max(len(a), len(b))
    return [(a[i] if i < len(a) else 0) + (b[i] if i < len(b) else 0) for i in range(length)]
