"""Which of a trunk's layers can be left out while drafting: a short search on a calibration text.

Every set of one size costs the same to draft with, so the one that gets most tokens accepted is the best.
Shapes: T calibration tokens, V vocabulary, L layers.
"""

import random
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from decoding.sampling import check_number
from mtp import Network, Trunk, UserError

TOKENS = 64  # of the calibration text that are read
LENGTH = 4  # drafted tokens that a step is judged by
SWAPS = 16  # exchanges of one layer that are tried
TEXT = '''The library opens at nine in the morning and closes at six in the evening. On Sunday it is closed.
In the first year there were 1,204 visitors; in the second year there were more than twice as many.

def count(words):
    """Count how often every word occurs."""
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts
'''

FOUND: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def found(network: Network, share: float, calibration: str | None) -> tuple[int, ...]:
    """The layers to leave out, in order; searched once for a model, share and text."""
    known = FOUND.setdefault(network.trunk.model, {})
    key = (share, calibration)
    if key not in known:
        known[key] = search(network.trunk, calibration_tokens(network, calibration), share)
    return known[key]


@torch.inference_mode()
def search(trunk: Trunk, tokens: Tensor, share: float) -> tuple[int, ...]:
    """Start with the layers that can best be spared, one at a time; then keep exchanges of one that help.

    One teacher-forced pass over tokens [1, T] for each candidate. Deterministic: equals go to the lower layer
    and the exchanges come from a fixed seed.
    """
    layers = range(1, trunk.num_layers)
    count = min(max(1, round(share * trunk.num_layers)), len(layers))
    whole = trunk(tokens, taps=tuple(layers))
    agreed = lambda skip: expected_accepted(agreement(trunk, tokens, whole, skip))  # noqa: E731
    ranked = sorted(layers, key=lambda layer: -agreed((layer,)))
    best = tuple(sorted(ranked[:count]))
    score, chance = agreed(best), random.Random(0)
    for _ in range(SWAPS if count < len(layers) else 0):
        out, into = chance.choice(best), chance.choice([layer for layer in layers if layer not in best])
        other = tuple(sorted({*best, into} - {out}))
        if (value := agreed(other)) > score:
            best, score = other, value
    return best


def agreement(trunk: Trunk, tokens: Tensor, whole: Any, skip: tuple[int, ...]) -> Tensor:
    """[T] bool: where the trunk without the layers `skip` has the whole trunk's best token."""
    hidden = whole.states[skip[0]]
    for layer in range(skip[0], trunk.num_layers):
        if layer not in skip:
            hidden, _ = trunk.run(hidden, layer, layer + 1)
    return (trunk.unembed(hidden).argmax(-1) == whole.logits.argmax(-1))[0]


def expected_accepted(agrees: Tensor, length: int = LENGTH) -> float:
    """Mean over positions of how many tokens in a row agree from there on, `length` at most.

    >>> expected_accepted(torch.tensor([True, True, False, True]), length=2)
    1.0
    """
    runs, run = 0, 0
    for true in reversed(agrees.tolist()):
        run = run + 1 if true else 0
        runs += min(run, length)
    return runs / len(agrees)


def calibration_tokens(network: Network, calibration: str | None) -> Tensor:
    """[1, T] of the text, or of the built-in one; ids drawn from a fixed seed where there is no tokenizer.

    Never the prompt: what is drafted, and with it a sampled text, would depend on what was decoded before.
    """
    trunk, tokenizer = network.trunk, network.tokenizer
    most = min(TOKENS, trunk.context)
    if calibration is not None and not isinstance(calibration, str):
        raise UserError(f"drafter.calibration={calibration!r} is not a text")
    if calibration is not None and tokenizer is None:
        raise UserError("drafter.calibration: this network has no tokenizer; give drafter.skip")
    if tokenizer is None:
        ids = torch.randint(trunk.vocab_size, (most,), generator=torch.Generator().manual_seed(0)).tolist()
    else:
        ids = tokenizer(TEXT if calibration is None else calibration)["input_ids"][:most]
    if not ids:
        raise UserError("drafter.calibration has no token; at least one is needed")
    return torch.tensor([ids], device=trunk.device)


def check_share(share: object) -> None:
    check_number("drafter.share", share, low=0.0, high=1.0, open_low=True)
