"""Lookup where the text has been like this before, a head where it has not.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.cache import KVCache
from decoding.draft import Context, Draft, Drafter
from decoding.generate import build_drafter, drafter_names
from decoding.verify import one_hot
from mtp import Network, UserError
from mtp.errors import check_whole

LOOKUPS = ("ngram", "suffix")


class Hybrid:
    """A row drafts with `lookup` when that finds anything, else with `head`; rows of a batch may differ.

    What lookup finds depends on the text up to the root alone, so the choice cannot bend the law. The head is
    told of every token, whoever drafted it.
    """

    def __init__(self, lookup: Drafter, head: Drafter):
        self.lookup, self.head = lookup, head
        self.taps = head.taps

    def __copy__(self) -> "Hybrid":
        return Hybrid(copy.copy(self.lookup), copy.copy(self.head))

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.lookup.reset(batch_size, cache)
        self.head.reset(batch_size, cache)

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.lookup.extend(tokens, states, keep)
        self.head.extend(tokens, states, keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        found = self.lookup.propose(root, num_draft_tokens, context)
        matched = (found.parents >= 0).any(1).tolist()
        if all(match or room <= 0 for match, room in zip(matched, context.room, strict=True)):
            return found
        drafted = self.head.propose(root, num_draft_tokens, context)
        return mixed(found, drafted, matched) if any(matched) else drafted

    def select(self, rows: Tensor) -> None:
        self.lookup.select(rows)
        self.head.select(rows)


def mixed(found: Draft, drafted: Draft, matched: list[bool]) -> Draft:
    """Rows of `found`, which is deterministic, where matched, else those of `drafted`.

    States that `drafted` ran ahead are of other tokens in the matched rows, so scoring starts at layer 0.
    """
    width = max(found.tokens.shape[1], drafted.tokens.shape[1])
    pick = torch.tensor(matched, device=found.tokens.device)[:, None]
    tokens = torch.where(pick, widened(found.tokens, width, 0), widened(drafted.tokens, width, 0))
    parents = torch.where(pick, widened(found.parents, width, -1), widened(drafted.parents, width, -1))
    if drafted.q is None:
        return Draft(tokens, parents)
    q = one_hot(tokens, drafted.q)
    count = drafted.q.shape[1]
    q[:, :count] = torch.where(pick[..., None], q[:, :count], drafted.q)
    return Draft(tokens, parents, q)


def widened(nodes: Tensor, width: int, value: int) -> Tensor:
    """[B, N] -> [B, width]"""
    return pad(nodes, (0, width - nodes.shape[1]), value=value)


def build(
    network: Network,
    lookup: str = "suffix",
    head: str = "sequential",
    min_match: int = 4,
    lookup_options: Mapping[str, Any] | None = None,
    head_options: Mapping[str, Any] | None = None,
) -> Hybrid:
    """min_match: tokens of the text's end that must have stood before for lookup to draft."""
    check_whole("drafter.min_match", min_match, 1)
    heads = [name for name in drafter_names() if name not in (*LOOKUPS, "hybrid", "none")]
    for key, value, allowed in (("lookup", lookup, LOOKUPS), ("head", head, heads)):
        if value not in allowed:
            raise UserError(f"drafter.{key}={value!r} is not one of {', '.join(allowed)}")
    shortest = {"min_match": min_match}
    if lookup == "ngram":
        shortest = {"min_ngram": min_match, "max_ngram": max(min_match, 4)}
    return Hybrid(
        part(network, "lookup", lookup, shortest | dict(lookup_options or {})),
        part(network, "head", head, dict(head_options or {})),
    )


def part(network: Network, key: str, name: str, options: dict[str, Any]) -> Drafter:
    """One of the two drafters; what is wrong with its options is told by the keys that they have here."""
    try:
        return build_drafter(network, name, **options)
    except UserError as error:
        raise UserError(str(error).replace("drafter.", f"drafter.{key}_options.")) from None
