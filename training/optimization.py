"""How weights move: AdamW with a warmup and a cosine, and a check of its numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mtp.errors import UserError
from training.schedule import learning_rate_factor


@dataclass(frozen=True, slots=True)
class Optimization:
    """AdamW on a warmup and a cosine. A batch is one step, run `micro_rows` rows at a time (None: all)."""

    lr: float
    warmup_steps: int
    lr_floor: float  # of lr
    max_steps: int
    weight_decay: float  # on matrices only
    betas: tuple[float, float]
    clip: float
    micro_rows: int | None

    def __post_init__(self) -> None:
        check("max_steps", self.max_steps, 1, whole=True)
        check("warmup_steps", self.warmup_steps, 0, whole=True)
        for key in ("lr", "lr_floor", "weight_decay"):
            check(key, getattr(self, key), 0)
        check("clip", self.clip, 0)
        if not self.clip:
            raise UserError(
                "trainer.clip=0 would leave nothing of the gradient; a large number clips nothing"
            )
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2 or not all(map(is_beta, self.betas)):
            raise UserError(f"trainer.betas={self.betas} is not a list of two numbers from 0 to below 1")
        if self.micro_rows is not None:
            check("micro_rows", self.micro_rows, 1, whole=True)

    def lr_at(self, step: int) -> float:
        return self.lr * learning_rate_factor(
            step, warmup_steps=self.warmup_steps, max_steps=self.max_steps, floor=self.lr_floor
        )

    def optimizer(self, trained: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = list(trained)
        # By shape, and sharded ones apart from whole ones, which cannot step along with them.
        kinds: dict[tuple[bool, type], list[nn.Parameter]] = {}
        for parameter in trained:
            kinds.setdefault((parameter.ndim >= 2, type(parameter.data)), []).append(parameter)
        groups = [
            {"params": params, "weight_decay": self.weight_decay if matrix else 0.0}
            for (matrix, _), params in kinds.items()
        ]
        fused = all(parameter.is_cuda for parameter in trained)
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), fused=fused)


def is_beta(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def check(key: str, value: Any, least: float, *, whole: bool = False) -> None:
    kind, name = (int, "whole number") if whole else ((int, float), "number")
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
        raise UserError(f"trainer.{key}={value} is not a {name} from {least} on")
