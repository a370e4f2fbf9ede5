"""What each head's gradient does to the trunk: its size, its spikes, its direction against the next token's.

At the taps this costs next to nothing, because the backward pass gathers every family's gradient there before
it goes on through the trunk. It is the gradient in the trunk's states, not in its weights; `in_weights` has
that, for the time of one more step a family. Shapes: B rows, T tokens, H hidden size.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from training.backward import States

SPIKE = 3.0  # a gradient norm of so many times the median counts as one


class TapGradients:
    """Gathers each family's gradient at the taps, step by step, until it is told as numbers.

    Squares of norms add up over the rows of micro-batches and processes, so the norm of a step is that of its
    whole batch. The cosine is over all taps that the family reads, at the steps that are logged.
    """

    def __init__(self) -> None:
        self.count = 0  # steps since the last lap
        self.steps: dict[str, list[Tensor]] = {}  # family -> squared norm of each step
        self.products: dict[str, Tensor] = {}  # family -> [3]: product with the next token's, both squares

    def begin_step(self) -> None:
        self.count += 1

    def note(self, family: str, found: States) -> None:
        """Add a micro-batch's gradient of a family, tap -> [B, T, H]."""
        if found:
            square = product(found, found)
            line = self.steps.setdefault(family, [])
            line += [torch.zeros_like(square)] * (self.count - len(line))
            line[-1] = line[-1] + square

    def compare(self, family: str, found: States, next_token: States) -> None:
        """Add a micro-batch's product with the next token's gradient at the same taps."""
        other = {tap: next_token[tap] for tap in found if tap in next_token}
        if not other:
            return
        mine = {tap: found[tap] for tap in other}
        three = torch.stack([product(mine, other), product(mine, mine), product(other, other)])
        self.products[family] = self.products[family] + three if family in self.products else three

    def squares(
        self, summed: Callable[[dict[str, Tensor]], dict[str, list[float]]]
    ) -> dict[str, list[float]]:
        """family -> squared norm of every step since the last lap."""
        lines = {}
        for name, line in self.steps.items():
            whole = line + [torch.zeros(())] * (self.count - len(line))
            lines[name] = torch.stack([square.to(line[-1].device) for square in whole])
        return summed(lines) if lines else {}

    def go_on(self, squares: dict[str, list[float]], processes: int) -> None:
        """Take up a lap that was broken off, each process an equal share of it."""
        self.steps = {name: list((torch.tensor(line) / processes).unbind()) for name, line in squares.items()}
        self.count = max(map(len, squares.values()), default=0)

    def lap(self, summed: Callable[[dict[str, Tensor]], dict[str, list[float]]]) -> dict[str, float]:
        """What has come together since the last lap; `summed` adds up over all processes."""
        found: dict[str, float] = {}
        for name, squares in self.squares(summed).items():
            found |= norms(name, [square**0.5 for square in squares])
        if self.products:
            for name, (dot, one, two) in summed(self.products).items():
                if one > 0 and two > 0:
                    found[f"train/{name}/tap_gradient_cosine"] = dot / (one * two) ** 0.5
        self.count, self.steps, self.products = 0, {}, {}
        return found


def norms(name: str, values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and spikes of a family's norms over some steps.

    >>> norms("eagle", [1.0, 1.0, 1.0, 5.0])["train/eagle/tap_gradient_spikes"]
    1.0
    """
    line = torch.tensor(values, dtype=torch.float64)
    median = line.median().item()
    key = f"train/{name}/tap_gradient"
    return {
        f"{key}_median": median,
        f"{key}_p99": line.quantile(0.99).item(),
        f"{key}_spikes": float((line > SPIKE * median).sum()),
    }


def product(one: States, two: States) -> Tensor:
    return torch.stack([(one[tap].float() * two[tap].float()).sum() for tap in one]).sum()


def at_lower_taps(states: States, last: int, found: States, wanted: Iterable[int]) -> States:
    """The next token's gradient, known at tap `last`, taken back to other taps; the graph stays."""
    lower = [tap for tap in wanted if tap != last and states[tap].requires_grad]
    if not lower or last not in found:
        return found
    taken = torch.autograd.grad(
        states[last], [states[tap] for tap in lower], found[last], retain_graph=True, allow_unused=True
    )
    return found | {tap: value for tap, value in zip(lower, taken, strict=True) if value is not None}


def in_weights(
    run: Callable[[str], None], families: list[str], trunk: nn.Module, trained: list[nn.Parameter]
) -> dict[str, float]:
    """Norm of every family's gradient in the trunk's weights, and its cosine with that of families[0].

    run(name) adds one family's gradient to all weights; here it is taken away again.
    """
    found: dict[str, float] = {}
    first: list[Tensor | None] = []
    for name in families:
        run(name)
        own = [parameter.grad for parameter in trunk.parameters()]
        first = first or own
        for parameter in trained:
            parameter.grad = None
        size, base = size_of(own), size_of(first)
        found[f"train/{name}/weight_gradient_norm"] = size.item()
        if name != families[0] and size > 0 and base > 0:
            found[f"train/{name}/weight_gradient_cosine"] = dot(own, first) / (size * base).item()
    return found


def dot(one: list[Tensor | None], two: list[Tensor | None]) -> float:
    pairs = zip(one, two, strict=True)
    return sum(float((a.float() * b.float()).sum()) for a, b in pairs if a is not None and b is not None)


def size_of(values: list[Tensor | None]) -> Tensor:
    return torch.stack([torch.zeros(()), *(v.float().norm().cpu() for v in values if v is not None)]).norm()
