"""One network under measurement: its prompts, what its trunk makes of them, what drafters say of that.

Texts and passes are made once and shared by all drafters on the network; texts of a frozen trunk by all
networks that have it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ablation.drafters import drafter_maker, drafter_name, drafter_options
from decoding.forecast import SELF_FED, TEXTS_AT_ONCE, Passed, Written, in_room, ratios, run, write
from decoding.generate import check_eos
from decoding.ledger import inside
from decoding.payoff import Heard, listen
from decoding.replay import Terms, Text
from decoding.sampling import Sampling
from mtp import Network
from mtp.checkpoint import fingerprint
from mtp.network import resolve

Prompts = dict[str, list[list[int]]]  # by split
FORETOLD = (
    "sequential",
    "parallel",
    "early_exit",
    "medusa",
)  # heads that say all at once what they would draft


@dataclass(slots=True)
class Subject:
    """A network, its prompts by split, and what is known of them so far."""

    network: Network
    key: str  # of the trunk
    prompts: Prompts
    new_tokens: int
    texts_of_trunks: dict[tuple[Any, ...], list[Written]]  # shared with other subjects
    passes_of: dict[tuple[str, float], list[Passed]] = field(default_factory=dict)

    def texts(self, split: str, temperature: float) -> list[Written]:
        """What plain decoding makes of the split's prompts."""
        prompts = self.prompts[split]
        key = (self.key, split, temperature, len(prompts), self.new_tokens)
        if key not in self.texts_of_trunks:
            found = write(self.network, prompts, temperature, self.new_tokens)
            self.texts_of_trunks[key] = found
        return self.texts_of_trunks[key]

    def terms(self, build: dict[str, Any], split: str, temperature: float, longest: int) -> Heard:
        """The ledger's terms of a drafter by draft length, an entry a text."""
        name = drafter_name(build)
        if name == "none":
            found = [silent(text) for text in self.texts(split, temperature)]
            return dict.fromkeys(range(1, longest + 1), found)
        if name in FORETOLD and name in self.network.heads and not any(own_options(build)):
            found = [
                term
                for passed in self.passes(split, temperature)
                for term in foretold(self.network, name, passed, temperature, longest)
            ]
            return dict.fromkeys(range(1, longest + 1), found)
        return self.replayed(build, split, temperature, longest)

    def passes(self, split: str, temperature: float) -> list[Passed]:
        key = (split, temperature)
        if key not in self.passes_of:
            texts, heads = self.texts(split, temperature), self.network.heads
            names = [name for name in FORETOLD if name in heads and name not in SELF_FED]
            taps = tuple(sorted({tap for name in names for tap in taps_of(heads[name])}))
            with torch.inference_mode():
                self.passes_of[key] = [
                    run(self.network, texts[at : at + TEXTS_AT_ONCE], taps)
                    for at in range(0, len(texts), TEXTS_AT_ONCE)
                ]
        return self.passes_of[key]

    def replayed(self, build: dict[str, Any], split: str, temperature: float, longest: int) -> Heard:
        """Of any drafter, through the loop; an empty answer where nothing can be computed."""
        sampling, name = Sampling(temperature=temperature), drafter_name(build)
        texts = [
            Text(text.token_ids[: text.prompt], text.token_ids[text.prompt :], sampling, text.limit)
            for text in self.texts(split, temperature)
        ]
        make = drafter_maker(self.network, build)
        heard, _ = listen(self.network, [texts], {name: make}, longest, check_eos(self.network, None))
        return heard.get(name, {})


def own_options(build: dict[str, Any]) -> list[Any]:
    """Options that make another draft than the head's plain chain."""
    return [value for key, value in drafter_options(build).items() if key != "top_k" and value is not None]


def taps_of(head: Any) -> tuple[int, ...]:
    return head.taps


def subject(
    network: Network, model: str, prompts: Callable[[str], list[list[int]]], new_tokens: int, texts: Any
) -> Subject:
    """Of a network loaded from the folder `model`."""
    by_split = {split: prompts(split) for split in ("held_out", "validation")}
    return Subject(network, fingerprint(Path(resolve(model))), by_split, new_tokens, texts)


@torch.inference_mode()
def foretold(network: Network, name: str, passed: Passed, temperature: float, longest: int) -> list[Terms]:
    """The same terms as a replay's, from one pass over the texts: what a head says, given the true tokens."""
    found = []
    for r, text in zip(ratios(network, name, passed, temperature, longest), passed.texts, strict=True):
        drafted = inside(r) & r.isfinite() & in_room(r, text.limit)
        heights = drafted.cumprod(0).sum(0).tolist()
        known = r.nan_to_num(nan=0.0).where(drafted, 0.0)
        found.append(Terms(known, torch.zeros_like(known), drafted.double(), heights, True))
    return found


def silent(text: Written) -> Terms:
    """Of a drafter that drafts nothing."""
    size = len(text.token_ids) - text.prompt
    nothing = torch.zeros(1, size, dtype=torch.float64)
    return Terms(nothing, nothing, nothing, [0] * size, True)
