"""The speed that acceptance and the parts' costs allow: the ledger's exact expectation, priced part by part.

A step that drafts n tokens costs n·c + T(n+1)/T(1), in steps of plain decoding: T(w) is a step that scores w
tokens, c what drafting one costs. An early exit shares the trunk's cache, so its step costs n+1 passes of the
lower layers over one token and n of the output head, all inside the drafter, and one of the upper layers over
n+1 tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from decoding.cache import KVCache
from decoding.contest import Build
from decoding.costs import WARM, measure
from decoding.draft import Autoregressive
from decoding.draft_length import Costs
from decoding.drafters.layer_skip import LayerSkip
from decoding.payoff import Heard, entry, listen
from decoding.replay import Text
from decoding.roofline import timed_call
from decoding.timed import Timed
from mtp import Network

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
LONGEST = 8  # drafts considered where the length is automatic
TOGETHER = 8  # texts replayed at once
CALLS = 7


@dataclass(frozen=True, slots=True)
class Promise:
    """What one drafter would give at this length, were there nothing but acceptance and the parts' costs."""

    num_draft_tokens: int
    tau: float
    speedup: float


def scoring(network: Network, text: Text, widths: Sequence[int] = WIDTHS) -> Costs:
    """Seconds of a step by the number of *drafted* tokens that it scores, one less than its width; the drafts
    cost nothing."""
    return measure(network, [text], Autoregressive(), "token", [width - 1 for width in widths], calls=CALLS)


def drafting(network: Network, text: Text, build: Build, length: int) -> float:
    """Seconds inside the drafter by drafted token, when a step drafts `length` of them."""
    timed = Timed(build())
    measure(network, [text], timed, "token", [length], calls=CALLS)
    return median(timed.steps()[WARM:]) / length


def head_prices(scored: Costs, draft_seconds: float, longest: int) -> list[float]:
    """Steps that draft 0 ... longest tokens, in steps of plain decoding.

    >>> costs = Costs(); costs.add(0, 2.0); costs.add(2, 3.0)
    >>> head_prices(costs, 0.5, 2)
    [1.0, 1.5, 2.0]
    """
    plain = scored(0)
    return [(n * draft_seconds + scored(n)) / plain for n in range(longest + 1)]


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of an early exit's step: inside the drafter for two numbers of drafted tokens, and of all
    layers above the exit with the output head by the number of tokens."""

    drafting: dict[int, float]
    upper: dict[int, float]

    def prices(self, longest: int, plain: float) -> list[float]:
        """Steps that draft 0 ... longest tokens, in plain decoding's, which take `plain` seconds.

        A plain step has a pass of the lower layers too; it is taken to cost what one more drafted token does.

        >>> Parts(drafting={2: 5.5, 4: 9.5}, upper={1: 2.0, 3: 3.0}).prices(2, plain=5.0)
        [1.0, 1.4, 1.9]
        """
        scored = Costs()
        for width, seconds in self.upper.items():
            scored.add(width - 1, seconds)
        (fewer, first), (more, last) = sorted(self.drafting.items())
        each = (last - first) / (more - fewer)
        steps = [plain + first + (n - 1 - fewer) * each + scored(n) - scored(0) for n in range(longest + 1)]
        return [1.0, *(step / plain for step in steps[1:])]


@torch.inference_mode()
def upper_passes(
    network: Network, ids: list[int], exit_layer: int, widths: Sequence[int] = WIDTHS
) -> dict[int, float]:
    """Seconds of the layers from the exit on, after the text `ids`, by the number of tokens.

    They are timed in turn, so that a slow moment meets all alike.
    """
    trunk = network.trunk
    cache = KVCache(1, trunk.device)
    window = cache.open(len(ids))
    tokens = torch.tensor([ids], device=trunk.device)
    trunk(tokens, positions=window.positions, mask=window.mask, cache=cache, logits=False)
    cache.commit(torch.ones(1, len(ids), dtype=torch.bool))
    place = cache.open(1, causal=True)
    hidden, _ = trunk.run(
        trunk.embed(tokens[:, :1]), 0, exit_layer,
        positions=place.positions, mask=place.mask, cache=cache,
    )  # fmt: skip

    def upper(width: int) -> object:
        place, states = cache.open(width, causal=True), hidden.expand(1, width, -1)
        options = {"positions": place.positions, "mask": place.mask, "cache": cache}
        return trunk(tokens[:, :1].expand(1, width), start=exit_layer, states=states, **options)

    found: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(WARM + CALLS):
        for width, times in found.items():
            times.append(timed_call(partial(upper, width), trunk.device))
    return {width: median(times[WARM:]) for width, times in found.items()}


def prices(
    network: Network, text: Text, build: Build, scored: Costs, length: int, longest: int
) -> dict[str, Any]:
    """What drafting costs, timed with drafts of `length`, and steps that draft 0 ... longest tokens."""
    drafter, seconds = build(), drafting(network, text, build, length)
    found: dict[str, Any] = {"c": seconds / scored(0), "timed_at": length}
    if not (isinstance(drafter, LayerSkip) and not drafter.upper):  # an early exit skips all layers above
        return found | {"prices": head_prices(scored, seconds, longest)}
    twice = drafting(network, text, build, 2 * length)
    of_step = Parts(
        {length: seconds * length, 2 * length: twice * 2 * length},
        upper_passes(network, text.prompt_ids, drafter.exit_layer),
    )
    return found | {"parts": asdict(of_step), "prices": of_step.prices(longest, scored(0))}


def promise(
    network: Network,
    texts: Sequence[Text],
    build: Build,
    prices: list[float],
    *,
    lengths: Sequence[int],
    eos_token_ids: tuple[int, ...],
) -> Promise | None:
    """The best of these draft lengths on texts that plain decoding wrote greedily; drafting nothing is one.

    None for trees, whose steps cost more than their depth says, and where nothing can be computed.
    """
    best = Promise(0, 1.0, 1.0) if 0 in lengths else None
    asked = [length for length in lengths if length]
    written = [text for text in texts if text.token_ids]
    if not asked or not written:
        return best
    heard = replayed(network, written, build, max(asked), eos_token_ids)
    for length in asked if heard else ():
        terms = [one for by_length in heard for one in by_length[length]]
        if not all(one.chains for one in terms):
            return None
        found = entry("", length, "greedy", terms, prices)
        if best is None or (found.speedup or 0.0) > best.speedup:
            best = Promise(length, found.tau, found.speedup or 0.0)
    return best


def replayed(
    network: Network, texts: list[Text], build: Build, longest: int, eos: tuple[int, ...]
) -> list[Heard]:
    """Some texts at once, and a new drafter for the next: it must not know the earlier ones."""
    found = []
    for at in range(0, len(texts), TOGETHER):
        heard, left_out = listen(network, [texts[at : at + TOGETHER]], {"": build}, longest, eos)
        if left_out:
            return []
        found.append(heard[""])
    return found
