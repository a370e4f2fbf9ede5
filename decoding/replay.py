"""Known texts go through the loop once more, and drafters say what they would have drafted at every position.

The loop, cache, settings and drafters are those of decoding; only the verdict is given, one true token a
step, and every token that a drafter draws is the true one. So q_j given the true tokens is what the drafter
really draws from, whichever drafter it is. Shapes: R texts, B rows still going, N draft nodes, D depths, T
emitted tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.cache import KVCache
from decoding.draft import Context, Draft, Drafter, Verdict, no_draft
from decoding.draft_length import FixedLength
from decoding.forced import UNKNOWN, Forced, Pending
from decoding.loop import Verifier, decode
from decoding.rows import new_row
from decoding.sampling import Sampling
from decoding.tree import depths, is_chain
from mtp import Network


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the trunk made of it under `sampling`, which might have been `limit` tokens long."""

    prompt_ids: list[int]
    token_ids: list[int]
    sampling: Sampling
    limit: int


@dataclass(frozen=True, slots=True)
class Terms:
    """What the ledger needs of one drafter on one text; see decoding.ledger for the places j-1, t."""

    ratios: Tensor  # [D, T]
    matches: Tensor  # [D, T]
    tested: Tensor  # [D, T] 1 where depth j is drafted and all before it is as in the text
    heights: list[int]  # [T] depth of the deepest node, 0 where nothing is drafted
    chains: bool  # whether no draft had a branch


class Voice:
    """One drafter asked for `length` tokens at every position; `terms` has one entry a text.

    A drafter that draws would say the same of a shorter draft. One that looks up or ranks need not (`drawn`
    is then False), and has to be asked for every length.
    """

    def __init__(self, drafter: Drafter, length: int):
        self.drafter, self.length = drafter, length
        self.drawn = self.chains = True
        self.refused: str | None = None  # why nothing can be computed
        self.terms: list[Terms] = []

    def reset(self, cache: KVCache, rows: int, size: int) -> None:
        self.drafter.reset(rows, cache)
        self.pending: deque[Pending] = deque(maxlen=self.length)  # the latest first
        self.values = torch.zeros(3, rows, self.length, size, dtype=torch.float64, device=cache.device)
        self.heights = [[0] * size for _ in range(rows)]

    def ask(self, root: Tensor, context: Forced, rows: list[int], t: int) -> None:
        draft = self.drafter.propose(root, self.length, context)
        parents = draft.parents.cpu()
        self.drawn &= context.drew(draft)
        self.chains &= is_chain(parents)
        if draft.q is not None and not is_chain(parents):
            self.refused = self.refused or "draws siblings, which only a sample can tell"
        deepest = (depths(parents) * pad(parents >= 0, (1, 0))).amax(1)
        for row, height in zip(rows, deepest.tolist(), strict=True):
            self.heights[row][t] = height
        self.pending.appendleft(Pending(draft, torch.zeros_like(root)))

    def judge(self, p: Tensor, tokens: Tensor, rows: Tensor, t: int) -> None:
        """Token t, tokens [B] with laws p [B, V], is what depth j of the draft of j-1 steps ago is about."""
        for j, pending in enumerate(self.pending):
            self.values[:, rows, j, t - j] = pending.judge(p, tokens)
            if bool(pending.strayed.any()):
                self.refused = self.refused or "declares a law for a token that it did not draw"

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)
        self.pending = deque((pending.select(rows) for pending in self.pending), maxlen=self.length)

    def finish(self, sizes: list[int]) -> None:
        for row, size in enumerate(sizes):
            ratios, matches, tested = self.values[:, row, :, :size].cpu()
            self.terms.append(Terms(ratios, matches, tested, self.heights[row][:size], self.chains))


class Chorus:
    """All voices as one drafter that proposes nothing, and the verdict that knows the text."""

    def __init__(self, network: Network, texts: Sequence[Text], voices: Sequence[Voice]):
        self.voices = voices
        self.taps = tuple(sorted({tap for voice in voices for tap in voice.drafter.taps}))
        self.size = max(len(text.token_ids) for text in texts)
        width = self.size + max((voice.length for voice in voices), default=0)
        lines = [text.token_ids + [UNKNOWN] * (width - len(text.token_ids)) for text in texts]
        self.tokens = torch.tensor(lines, device=network.trunk.device)  # [R, width]
        context = network.trunk.context
        self.limits = [min(text.limit, context - len(text.prompt_ids)) for text in texts]

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.t, self.rows = 0, torch.arange(batch_size)
        for voice in self.voices:
            voice.reset(cache, batch_size, self.size)

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        for voice in self.voices:
            voice.drafter.extend(tokens, states, keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        rows = self.rows.tolist()
        left = [self.limits[row] - self.t - 1 for row in rows]
        truth = self.tokens[self.rows.to(root.device), self.t :]
        for voice in self.voices:
            room = [min(most, voice.length) for most in left]
            voice.ask(root, Forced(context, room, truth), rows, self.t)
        return no_draft(root)

    def verify(self, p: Tensor, draft: Draft, u: Tensor) -> Verdict:
        rows = self.rows.to(p.device)
        token = self.tokens[rows, self.t]
        for voice in self.voices:
            voice.judge(p[:, 0], token, rows, self.t)
        self.t += 1
        return Verdict(torch.ones_like(token, dtype=torch.bool)[:, None], token)

    def select(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]
        for voice in self.voices:
            voice.select(rows)


def replay(
    network: Network, texts: Sequence[Text], voices: Sequence[Voice], eos_token_ids: tuple[int, ...] = ()
) -> None:
    """One pass over texts that have a token, all together and with all voices, whose terms grow by them.

    eos_token_ids must be those of the run that wrote the texts: a minimum length holds them back.
    """
    rows = [
        new_row(
            network, index=index, prompt=text.prompt_ids, sampling=text.sampling, seed=0, stop=(),
            max_new_tokens=len(text.token_ids), eos=eos_token_ids, device=network.trunk.device,
        )
        for index, text in enumerate(texts)
    ]  # fmt: skip
    chorus = Chorus(network, texts, voices)
    decode(network, rows, chorus, FixedLength(0), Verifier(chorus.verify))
    for voice in voices:
        voice.finish([len(text.token_ids) for text in texts])
