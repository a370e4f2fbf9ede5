"""The expected τ of a network's own heads, from one pass over texts that its trunk wrote.

A head's `readouts` say at every position what it would draft there, given the true tokens in between: just
what the ledger needs. decoding.replay tells the same of any drafter and setting, token by token; this is for
numbers that are wanted often, such as while training.
Shapes: B texts, T emitted tokens, D depths, S tokens of prompt and text, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.generate import drafter_names, generate
from decoding.ledger import expected, inside, survival_token
from decoding.sampling import Sampling
from mtp import Network, UserError
from mtp.readout import Readout

TEXTS_AT_ONCE = 8
SELF_FED = ("eagle", "hybrid")  # what they draft at depth 2 hangs on their own draft, not on the text


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt of P tokens and the T tokens that plain decoding continued it by, in one line."""

    token_ids: list[int]  # [P + T]
    prompt: int  # P
    limit: int  # of T: what no step could have used was not drafted


@dataclass(frozen=True, slots=True)
class Foretold:
    """Of one head and one temperature, summed over all texts."""

    tau: float
    acceptance: list[float]  # by depth: accepted / tested; 0 where nothing was tested


class Forecast:
    """τ at several temperatures of drafts of `length` tokens, on what the trunk makes of the prompts.

    Of a frozen trunk, texts and states are kept, and a call costs the heads alone. `texts` are those that
    were written before, by temperature.
    """

    def __init__(
        self,
        network: Network,
        prompts: Sequence[list[int]],
        *,
        heads: Sequence[str],
        length: int = 4,
        new_tokens: int = 128,
        temperatures: Sequence[float] = (0.0, 1.0),
        frozen: bool = False,
        texts: Mapping[float, list[Written]] | None = None,
    ):
        self.network, self.prompts, self.length, self.new_tokens = network, list(prompts), length, new_tokens
        self.temperatures, self.frozen = temperatures, frozen
        self.heads = [name for name in heads if name in drafter_names() and name not in SELF_FED]
        if not self.heads:
            raise UserError(f"no expected τ can be told of {', '.join(heads) or 'no heads'}")
        self.known: dict[float, list[Passed]] = {}
        self.texts = dict(texts or {})

    @torch.inference_mode()
    def __call__(self) -> dict[str, dict[float, Foretold]]:
        """head -> temperature -> what is foretold."""
        found: dict[str, dict[float, Foretold]] = {name: {} for name in self.heads}
        for temperature in self.temperatures:
            passes = self.known.get(temperature) or self.passes(temperature)
            if self.frozen:
                self.known[temperature] = passes
            for name in self.heads:
                found[name][temperature] = self.foretell(name, temperature, passes)
        return found

    def passes(self, temperature: float) -> list["Passed"]:
        texts = self.texts.get(temperature)
        if texts is None:
            texts = write(self.network, self.prompts, temperature, self.new_tokens)
        heads: list[Any] = [self.network.heads[name] for name in self.heads]
        taps = {tap for head in heads for tap in head.taps}
        return [
            run(self.network, texts[at : at + TEXTS_AT_ONCE], tuple(sorted(taps)))
            for at in range(0, len(texts), TEXTS_AT_ONCE)
        ]

    def foretell(self, name: str, temperature: float, passes: list["Passed"]) -> Foretold:
        tokens, steps = 0, 0.0
        tested, accepted = torch.zeros(2, self.length, dtype=torch.float64)
        for one in passes:
            found = ratios(self.network, name, one, temperature, self.length)
            for r, text in zip(found, one.texts, strict=True):
                drafted = inside(r) & r.isfinite() & in_room(r, text.limit)
                here = expected(survival_token(r.nan_to_num(nan=0.0)), self.length, drafted)
                tokens, steps = tokens + r.shape[1], steps + here.steps
                tested += torch.tensor(here.tested_at_depth, dtype=torch.float64)
                accepted += torch.tensor(here.accepted_at_depth, dtype=torch.float64)
        return Foretold(tokens / steps if steps else 1.0, (accepted / tested.clamp(min=1e-12)).tolist())


@dataclass(frozen=True, slots=True)
class Passed:
    """Some texts after the trunk has run over them; behind a text's end the line holds nothing of meaning."""

    texts: list[Written]
    tokens: Tensor  # [B, S]
    states: dict[int, Tensor]  # tap -> [B, S, H]


def write(
    network: Network, prompts: Sequence[list[int]], temperature: float, new_tokens: int
) -> list[Written]:
    """What plain decoding makes of the prompts, all together; prompt r has seed r."""
    sampling = Sampling(temperature=temperature)
    done = generate(network, list(prompts), sampling=sampling, max_new_tokens=new_tokens, seed=0)
    return [
        Written(ids + one.token_ids, len(ids), min(new_tokens, network.trunk.context - len(ids)))
        for one in done
        if one.token_ids and (ids := one.prompt_ids)
    ]


def run(network: Network, texts: list[Written], taps: tuple[int, ...]) -> Passed:
    trunk, size = network.trunk, max(len(text.token_ids) for text in texts)
    lines = [text.token_ids + [0] * (size - len(text.token_ids)) for text in texts]
    tokens = torch.tensor(lines, device=trunk.device)
    taps = tuple(sorted({*taps, trunk.num_layers}))
    return Passed(texts, tokens, trunk(tokens, taps=taps, logits=False).states)


def ratios(network: Network, name: str, passed: Passed, temperature: float, length: int) -> list[Tensor]:
    """r [D, T] of every text, as in decoding.ledger; NaN where the head drafts nothing."""
    by_depth = readouts(network, name, passed, length)
    matrix = network.trunk.model.lm_head.weight
    found = []
    for row, text in enumerate(passed.texts):
        size = len(text.token_ids) - text.prompt
        tokens = passed.tokens[row, text.prompt : len(text.token_ids)]
        states = passed.states[network.trunk.num_layers][row, text.prompt - 1 :][:size]
        # A greedy text is what the target said; a tie or a rounding in this pass must not deny it.
        p = torch.ones_like(tokens).double()
        if temperature:
            p = chance(states @ matrix.T, tokens, temperature)
        r = torch.full((length, size), torch.nan, dtype=torch.float64)
        for depth, readout in enumerate(by_depth, start=1):
            roots, said = said_by(readout, depth, row, text)
            if said.shape[0]:
                true = tokens[roots[0] + depth - 1 :][: len(said)]
                q = chance(logits_of(readout, said, matrix), true, temperature)
                r[depth - 1, roots[0] : roots[1]] = (q / p[roots[0] + depth - 1 :][: len(said)]).cpu()
        found.append(r)
    return found


def in_room(r: Tensor, limit: int) -> Tensor:
    """[D, T] bool: whether the step's own token, behind depth j after root t, is within the limit."""
    depth, root = torch.arange(len(r))[:, None], torch.arange(r.shape[1])
    return root + depth + 2 <= limit


def said_by(readout: Readout, depth: int, row: int, text: Written) -> tuple[tuple[int, int], Tensor]:
    """First root and the root behind the last that draft depth j, and what the readout says there [., H].

    Root t is token P+t-1 of the line, and its draft at depth j is about token P+t+j-1. A readout at position
    i is about token i+1+depth: a head of depth j is read where i = P+t-2, before the root; an exit, of depth
    0, where i = P+t+j-2. With a prompt of one token the first root has nothing before it.
    """
    last = len(text.token_ids) - text.prompt - depth + 1  # roots 0 ... last-1 have such a token
    first = 1 if readout.depth and text.prompt == 1 else 0
    at = text.prompt - 2 + (0 if readout.depth else depth)
    return (first, max(first, last)), readout.hidden[row, at + first : at + max(first, last)]


def readouts(network: Network, name: str, passed: Passed, length: int) -> list[Readout]:
    """What the head says at depths 1 ... `length`, as far as it drafts so far."""
    head: Any = network.heads[name]
    trunk = network.trunk
    options = {"depth": length} if name == "sequential" else {}  # its last module goes on and on
    found = list(head.readouts(trunk, passed.tokens, passed.states, **options))
    if found[0].depth == 0:  # exits: one of them drafts every token
        return [next(one for one in found if one.name == f"layer{head.exit_layer}")] * length
    return found[:length]


def logits_of(readout: Readout, hidden: Tensor, matrix: Tensor) -> Tensor:
    """hidden [N, H] -> [N, V], -inf at the tokens that the head may not draft."""
    matrix = matrix if readout.matrix is None else readout.matrix
    if readout.ids is None:
        return hidden @ matrix.T
    full = hidden.new_full((len(hidden), len(matrix)), -torch.inf)
    return full.index_copy(1, readout.ids, hidden @ matrix[readout.ids].T)


def chance(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The law of logits [N, V] at tokens [N], float64; one-hot at temperature 0."""
    if temperature == 0:
        return (logits.argmax(-1) == tokens).double()
    logs = (logits.float() / temperature).log_softmax(-1)
    return logs.gather(-1, tokens[:, None])[:, 0].double().exp()
