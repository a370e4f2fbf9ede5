"""A reduced vocabulary for drafting: heads read only the trunk's output rows of the tokens that are frequent.

The unembedding is a large part of what a small head costs, and a token that is rarely drafted rarely pays for
its row. Shapes: R rows kept, V vocabulary, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mtp.errors import UserError, check_whole
from mtp.packed import PackedLinear
from mtp.trunk import Trunk

DraftVocab = int | Sequence[int] | None  # how many tokens, or which; None: all


def add_draft_ids(head: nn.Module, trunk: Trunk, draft_vocab: DraftVocab, kind: str) -> None:
    """Give the head the buffer `draft_ids` [R], ascending, or None for all; it is stored with its weights.

    A number R stands for the ids 0 ... R-1 until `keep_frequent` knows better, or the head's file does.
    """
    head.register_buffer("draft_ids", None)
    if draft_vocab is None:
        return
    name = f"{kind} head: draft_vocab"
    if isinstance(draft_vocab, Sequence) and not isinstance(draft_vocab, str):
        ids = list(draft_vocab)
        for token in ids:
            check_whole(name, token, 0, trunk.vocab_size - 1)
        if not ids or len(set(ids)) < len(ids):
            raise UserError(f"{name} names {len(ids)} ids, which are none at all or not all different")
    else:
        check_whole(name, draft_vocab, 1, trunk.vocab_size)
        ids = list(range(draft_vocab))
    head.draft_ids = torch.tensor(sorted(ids), device=trunk.device)


def stored_option(draft_vocab: DraftVocab) -> Any:
    """The option as it stands in a head's config.json; the ids themselves lie in its weights file."""
    return list(draft_vocab) if isinstance(draft_vocab, Sequence) else draft_vocab


def keep_frequent(head: Any, counts: Tensor) -> None:
    """Choose the most frequent tokens of a text with these counts [V]; of equally frequent ones the lowest.

    Nothing happens to a head without a draft vocabulary, or whose ids were given.

    >>> head = nn.Module(); head.options = {"draft_vocab": 2}; head.draft_ids = torch.tensor([0, 1])
    >>> keep_frequent(head, torch.tensor([1, 9, 0, 9]))
    >>> head.draft_ids
    tensor([1, 3])
    """
    if isinstance(head.options.get("draft_vocab"), int):
        most = counts.argsort(descending=True, stable=True)[: len(head.draft_ids)]
        head.draft_ids = most.sort().values.to(head.draft_ids.device)


def read_out(trunk: Trunk, hidden: Tensor, ids: Tensor | None) -> Tensor:
    """Logits [..., V] of what the output matrix reads, hidden [..., H]; -inf outside of ids [R]."""
    if ids is None:
        return trunk.lm_head(hidden)
    output = trunk.model.lm_head
    if isinstance(output, PackedLinear):
        kept = output.some(hidden, ids)
    else:
        kept = linear(hidden, output.weight[ids], None if output.bias is None else output.bias[ids])
    full = kept.new_full((*kept.shape[:-1], trunk.vocab_size), float("-inf"))
    return full.index_copy_(-1, ids, kept)
