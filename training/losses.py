"""What is minimised: the loss of every head, what each of its depths weighs, and how the trunk is trained."""

from dataclasses import dataclass

from mtp.errors import UserError
from training.readings import COUPLED, KINDS
from training.schedule import (
    CURRICULA,
    DROPOUT_SCHEDULES,
    dropout_rates,
    exit_scales,
    exit_weights,
    exits_enabled,
)


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """A head's loss and what its D depths weigh: `total` shared by them (DeepSeek-V3's lambda), or `each`.

    `kind` is the text's cross-entropy (`ce`) or a distance from the trunk's law: `kl` (as a gradient the
    cross-entropy with that law), `reverse_kl`, `tv`, `lk` (-log alpha), `hybrid` (with `eta`), and over whole
    drafts `tv_chain` and `accept`. With `decay` d depth k weighs d^(k-1) times as much as depth 1. From the
    last `late_share` of the steps on, `late` stands in place of total or each.
    """

    total: float | None = None
    each: float | None = None
    kind: str = "ce"
    decay: float = 1.0
    late: float | None = None
    late_share: float = 0.3
    feature: float = 0.0  # weight of the distance from the true state, for heads that foretell it; decays too
    eta: float = 3.0

    def __post_init__(self) -> None:
        if (self.total is None) == (self.each is None):
            raise UserError(
                f"loss: a head needs either total or each, found total={self.total}, each={self.each}"
            )
        if self.kind not in KINDS:
            raise UserError(f"loss.kind={self.kind} is not one of {', '.join(KINDS)}")
        for key in ("total", "each", "late", "decay", "feature", "eta"):
            check_not_negative(f"loss.{key}", getattr(self, key))
        check_share("loss.late_share", self.late_share)

    @property
    def coupled(self) -> bool:
        """Whether the depths of one draft come into one formula."""
        return self.kind in COUPLED

    def weights(self, depths: int, done: float = 0.0) -> list[float]:
        """One weight for each depth, when the share `done` of all steps lies behind.

        >>> HeadLoss(total=0.5).weights(2), HeadLoss(each=1.0).weights(2)
        ([0.25, 0.25], [1.0, 1.0])
        >>> HeadLoss(total=1.5, decay=0.5).weights(2), HeadLoss(each=0.5, decay=0.5).weights(2)
        ([1.0, 0.5], [0.5, 0.25])
        >>> HeadLoss(total=0.3, late=0.1, late_share=0.25).weights(1, done=0.75)
        [0.1]
        """
        shares = [self.decay**depth for depth in range(depths)]
        now = self.each if self.total is None else self.total
        if self.late is not None and done >= 1 - self.late_share:
            now = self.late
        assert now is not None
        unit = now if self.total is None else now / sum(shares)
        return [unit * share for share in shares]


@dataclass(frozen=True, slots=True)
class Objective:
    """How the trunk is trained: the loss of its exits, its layer dropout, and which heads may not move it.

    With exits, LayerSkip's J = sum_l e~(t, l) CE(g(x_{l+1})) replaces the plain next-token loss, which is its
    last term. Every `gradient_every` steps each head's gradient is compared with the next token's at the
    trunk's own weights, which costs a step's time for each head.
    """

    e_scale: float
    curriculum: str
    rotation: int
    p_max: float
    dropout_schedule: str
    detach: tuple[str, ...] = ()  # heads whose gradient stops before the trunk's layers, norm and matrices
    gradient_every: int | None = None

    def __post_init__(self) -> None:
        for key, allowed in (("curriculum", CURRICULA), ("dropout_schedule", DROPOUT_SCHEDULES)):
            if getattr(self, key) not in allowed:
                raise UserError(f"objective.{key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        check_share("objective.p_max", self.p_max)
        check_not_negative("objective.e_scale", self.e_scale)
        for key, value in (("rotation", self.rotation), ("gradient_every", self.gradient_every)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"objective.{key}={value} is not a whole number from 1 on")

    def for_trunk(self) -> str | None:
        """The first setting that would do nothing on a trunk that is not trained, as key=value."""
        if self.p_max:
            return f"p_max={self.p_max}"
        return None if self.gradient_every is None else f"gradient_every={self.gradient_every}"

    def layer_weights(self, num_layers: int, *, step: int, max_steps: int) -> list[float]:
        """e~(t, l) for l = 0..L-1; layer l is read after l+1 layers, the last one is the trunk itself."""
        enabled = exits_enabled(
            num_layers, self.curriculum, step=step, max_steps=max_steps, rotation=self.rotation
        )
        return exit_weights(exit_scales(num_layers, self.e_scale), enabled)

    def dropout(self, num_layers: int, *, step: int, max_steps: int) -> list[float]:
        return dropout_rates(
            num_layers, self.p_max, schedule=self.dropout_schedule, step=step, max_steps=max_steps
        )


def check_share(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UserError(f"{key}={value} is not a number between 0 and 1")


def check_not_negative(key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise UserError(f"{key}={value} is not a number from 0 on")
