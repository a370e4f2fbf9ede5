"""What changes with the step: learning rate, layer dropout, trained exits (LayerSkip, arXiv 2404.16710).

Everything is a pure function of the step, so a resumed run needs no state to go on exactly.
Letters: L layers numbered l = 0..L-1 as in the paper, t the step, T the number of steps, B rows.
"""

import math

import torch
from torch import Tensor

CURRICULA = ("none", "rotational", "gradual")
DROPOUT_SCHEDULES = ("constant", "exponential")


def learning_rate_factor(step: int, *, warmup_steps: int, max_steps: int, floor: float) -> float:
    """Fraction of the peak learning rate: a line up to 1 over the warmup, then a cosine down to `floor`.

    >>> [round(learning_rate_factor(t, warmup_steps=2, max_steps=6, floor=0.1), 3) for t in range(7)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def dropout_rates(num_layers: int, p_max: float, *, schedule: str, step: int, max_steps: int) -> list[float]:
    """Probability p_{l,t} = S(t) D(l) p_max that a row passes layer l by.

    D(l) = exp(l ln2 / (L-1)) - 1 is 0 at the first layer and 1 at the last. S is 1 (`constant`, for a trained
    trunk) or, from scratch, S(t) = exp(t ln2 / (T-1)) - 1 (`exponential`).

    >>> [round(p, 4) for p in dropout_rates(3, 0.1, schedule="constant", step=0, max_steps=10)]
    [0.0, 0.0414, 0.1]
    """
    time = 1.0 if schedule == "constant" else min(1.0, doubling(step, max_steps))
    return [time * doubling(layer, num_layers) * p_max for layer in range(num_layers)]


def doubling(index: int, count: int) -> float:
    """exp(index ln2 / (count-1)) - 1: from 0 at index 0 to 1 at index count-1."""
    return 2 ** (index / max(1, count - 1)) - 1


def kept_layers(
    rates: list[float], rows: int, *, seed: int, step: int, place: tuple[int, int] = (0, 1)
) -> Tensor | None:
    """Which rows run which layer, bool [L, B] on the CPU; None where every row runs every layer.

    Drawn from the seed and the step alone, the same after a resume. `place` is (r, R), the process and their
    number: all draw for all R*B rows, and process r takes rows r*B ... r*B+B-1 of them, so that R processes
    drop what one with the whole batch drops. A kept layer is not scaled up by 1/(1-p); neither is it in the
    paper (eq. 1).
    """
    if not any(rates):
        return None
    process, processes = place
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    drawn = torch.rand(processes * rows, len(rates), generator=generator)[process * rows :][:rows].T
    return drawn >= torch.tensor(rates)[:, None]


def exit_scales(num_layers: int, e_scale: float) -> list[float]:
    """e(l) = e_scale * sum_{i<=l} i for l < L-1, and e(L-1) = L-1 + e_scale * sum_{i<=L-2} i (eq. 5).

    >>> exit_scales(4, 0.5)
    [0.0, 0.5, 1.5, 4.5]
    """
    last = num_layers - 1
    inner = [e_scale * layer * (layer + 1) / 2 for layer in range(last)]
    return [*inner, last + e_scale * (last - 1) * last / 2]


def exits_enabled(
    num_layers: int, curriculum: str, *, step: int, max_steps: int, rotation: int
) -> list[bool]:
    """C(t, l): which layers have a loss at this step.

    `rotational`: every R-th layer, shifted by one each step. `gradual`: from the last layer down to the
    first, one more every T/(2L) steps. The last layer is always on: it is the trunk itself.

    >>> [int(on) for on in exits_enabled(7, "rotational", step=1, max_steps=100, rotation=3)]
    [0, 1, 0, 0, 1, 0, 1]
    >>> [int(on) for on in exits_enabled(4, "gradual", step=25, max_steps=100, rotation=1)]
    [0, 1, 1, 1]
    """
    last = num_layers - 1
    if curriculum == "rotational":
        on = [(layer - step) % rotation == 0 for layer in range(num_layers)]
    elif curriculum == "gradual":
        on = [step >= (last - layer) * max_steps / (2 * num_layers) for layer in range(num_layers)]
    else:
        on = [True] * num_layers
    return [*on[:last], True]


def exit_weights(scales: list[float], enabled: list[bool]) -> list[float]:
    """e~(t, l) = C(t, l) e(l) / sum_i C(t, i) e(i): weights of the layers' losses, which add up to 1.

    >>> exit_weights([0.0, 0.5, 1.5, 4.5], [True, False, True, True])
    [0.0, 0.0, 0.25, 0.75]
    """
    on = [scale if flag else 0.0 for scale, flag in zip(scales, enabled, strict=True)]
    total = sum(on)
    return [scale / total for scale in on] if total else [*on[:-1], 1.0]
