"""Drafting with a separate, smaller language model of the same vocabulary.

Shapes: B rows, W positions run at once, H hidden size, V the target's vocabulary.
"""

import os
from itertools import takewhile

import torch
from torch import Tensor

from decoding.branching import Chain
from decoding.cache import KVCache
from decoding.draft import Context, Draft, no_draft
from mtp import Network, Trunk, UserError


class DraftModel:
    """Speculative decoding as first published (arXiv 2211.17192): a small model writes, the trunk verifies.

    Its cache holds a row's text up to and including the root, then scratch for the drafts but the last. Those
    of them that the verdict made text stay, so no token that was drafted and accepted is run again.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, trunk: Trunk, shared: Tensor):
        self.trunk = trunk
        self.shared = shared  # [V] bool: ids that both models know
        self.all_shared = bool(shared.all())

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.cache = KVCache(batch_size, self.trunk.device)
        self.texts: list[list[int]] = [[] for _ in range(batch_size)]  # committed tokens
        self.ahead: list[list[int]] = [[] for _ in range(batch_size)]  # drafts in scratch behind the root

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        true = [
            [token for token, kept in zip(line, marks, strict=True) if kept]
            for line, marks in zip(tokens.tolist(), keep.tolist(), strict=True)
        ]
        right = [agreeing(new[1:], ran) for new, ran in zip(true, self.ahead, strict=True)]
        self.cache.commit(torch.arange(max(right)) < torch.tensor(right)[:, None])
        self.texts = [text + new for text, new in zip(self.texts, true, strict=True)]
        self.ahead = [[] for _ in self.texts]

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        left = [
            self.trunk.context - len(text) for text in self.texts
        ]  # root and drafts that it can still read
        room = [max(0, min(pair)) for pair in zip(context.room, left, strict=True)]
        count = min(num_draft_tokens, max(room))
        if count <= 0:
            return no_draft(root)
        hidden = self._caught_up(root, room)
        drawn = Chain(context)
        for depth in range(1, count + 1):
            token = drawn.draw(self._known(self.trunk.unembed(hidden)))
            if depth < count:
                hidden = self._run(token[:, None], first=depth - 1)[:, 0]
        draft = drawn.draft(room)
        ran = draft.tokens[:, :-1].tolist()
        self.ahead = [line if some else [] for line, some in zip(ran, room, strict=True)]
        return draft

    def _caught_up(self, root: Tensor, room: list[int]) -> Tensor:
        """Run what the cache lacks up to the root, for rows with room; the root's state [B, H]."""
        lines = [
            [*text[known:], token] if some else []
            for text, known, token, some in zip(
                self.texts, self.cache.lengths, root.tolist(), room, strict=True
            )
        ]
        counts = torch.tensor([len(line) for line in lines])
        width = int(counts.max())
        padded = torch.tensor([line + [0] * (width - len(line)) for line in lines], device=root.device)
        hidden = self._run(padded, first=0)
        self.cache.commit(torch.arange(width) < counts[:, None])
        rows = torch.arange(len(lines), device=root.device)
        return hidden[rows, (counts - 1).clamp(min=0).to(root.device)]

    def _run(self, tokens: Tensor, first: int) -> Tensor:
        """Tokens [B, W] -> states [B, W, H] after all layers; keys go to scratch slots from `first` on."""
        window = self.cache.open(tokens.shape[1], first=first)
        known = tokens.clamp(max=self.trunk.vocab_size - 1)  # an id only the target has is read as some other
        hidden, _ = self.trunk.run(
            self.trunk.embed(known), 0, self.trunk.num_layers,
            positions=window.positions, mask=window.mask, cache=self.cache,
        )  # fmt: skip
        return hidden

    def _known(self, logits: Tensor) -> Tensor:
        """The draft model's logits as the target's [B, V]; an id that only one has is never drafted."""
        size = len(self.shared)
        if logits.shape[-1] < size:
            logits = torch.nn.functional.pad(logits, (0, size - logits.shape[-1]))
        logits = logits[:, :size]
        return logits if self.all_shared else logits.masked_fill(~self.shared, -torch.inf)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.texts = [self.texts[row] for row in rows.tolist()]
        self.ahead = [self.ahead[row] for row in rows.tolist()]


def agreeing(ours: list[int], theirs: list[int]) -> int:
    """The number of tokens at the start that both lists have.

    >>> agreeing([5, 6, 7], [5, 6, 8, 7])
    2
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def shared_ids(network: Network, draft: Network) -> Tensor:
    """Which of the network's ids [V] the draft model has too; UserError unless both mean the same tokens.

    Output matrices may be padded beyond the tokenizer's vocabulary, to different sizes.
    """
    sizes = network.trunk.vocab_size, draft.trunk.vocab_size
    if network.tokenizer is None or draft.tokenizer is None:
        check_sizes(*sizes)
        return torch.ones(sizes[0], dtype=torch.bool, device=network.trunk.device)
    ours, theirs = (words(tokenizer) for tokenizer in (network.tokenizer, draft.tokenizer))
    check_sizes(len(ours), len(theirs))
    for token in sorted(ours):
        if ours[token] != theirs.get(token):
            raise UserError(
                f"drafter.model: another vocabulary: token {token} is {ours[token]!r} in the network and "
                f"{theirs.get(token)!r} in the draft model; they must be the same"
            )
    shared = torch.zeros(sizes[0], dtype=torch.bool)
    shared[[token for token in ours if token < min(sizes)]] = True
    return shared.to(network.trunk.device)


def words(tokenizer: object) -> dict[int, str]:
    return {token: word for word, token in tokenizer.get_vocab().items()}  # type: ignore[attr-defined]


def check_sizes(ours: int, theirs: int) -> None:
    if ours != theirs:
        raise UserError(
            f"drafter.model: another vocabulary: the network has {ours} tokens, the draft model {theirs}; "
            "they must be the same"
        )


def build(network: Network, model: Network | str | os.PathLike[str] | None = None) -> DraftModel:
    """model: a network folder or hub id, or a Network."""
    if not isinstance(model, (Network, str, os.PathLike)):
        found = "is missing" if model is None else f"is {model!r}"
        raise UserError(
            f"drafter.model {found}: draft_model needs a network folder or hub id, as in "
            "drafter.model=networks/pystdlib-draft"
        )
    draft = model if isinstance(model, Network) else load(network, model)
    return DraftModel(draft.trunk, shared_ids(network, draft))


def load(network: Network, model: str | os.PathLike[str]) -> Network:
    try:
        draft = Network.from_pretrained(model, dtype=network.trunk.dtype, device=network.trunk.device)
    except UserError as error:
        raise UserError(f"drafter.model: {str(error).removeprefix('model: ')}") from None
    draft.take_form(network.form)
    return draft
