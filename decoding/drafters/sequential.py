"""Drafting with DeepSeek-V3's sequential modules, their own states rolled back with the text.

Shapes: B rows, W positions run at once, N nodes, H hidden size.
"""

import dataclasses
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.branching import Chain, straight
from decoding.cache import KVCache
from decoding.committed import Committed
from decoding.draft import Context, Draft, no_draft
from decoding.drafters.parallel import drafting_room
from decoding.growth import Growth, read_growth
from decoding.heads import need_head
from decoding.staggered import Staggered
from mtp import Network
from mtp.drafting import Columns, Depths, columns_at, depths_of, picked, prepare
from mtp.sequential import Sequential


class Guess(NamedTuple):
    """A chain drafted after a root at position `lengths[row]`."""

    lengths: list[int]
    tokens: list[list[int]]


def final_slots(length: int, depth: int, right: int) -> int:
    """How many slots a module has final that ran on all `length` of them when the first `right` tokens of
    the draft that it was fed are those of the text.

    >>> [final_slots(7, depth, 0) for depth in (1, 2, 3)], [final_slots(7, depth, 1) for depth in (1, 2, 3)]
    ([7, 6, 5], [7, 7, 6])
    """
    return max(min(length, length + right - depth + 1), 0)


class SequentialDrafter:
    """With n committed tokens and the root at position n, module k drafts token n+k from slot n-1.

    Slot j of module k holds what it made of state h^{k-1}_j and token j+k. That is final when token j+k is
    the root or older: j <= n-k. `propose` fills the k-1 slots above with drafted tokens; they are scratch.
    All modules of a draft run on the same slots, from the first that one of them has not got final: each
    module's input states come straight from the module before it, and what a verdict changed is computed
    anew. A module that is not asked for lags behind and catches up when it is.

    Three modules ran with n = 7: modules 1, 2, 3 are final up to slots 6, 5, 4. One more token is committed,
    n = 8:
    all three run on slots 5, 6, 7. Had the first drafted token become the root, module 2 would be final up to
    slot 6 and module 3 up to slot 5, as what they were fed was right, and all three would run on slots 6, 7.

    In a tree a scratch slot is fed another token on every path, so its nodes lie behind these slots; see
    Staggered.
    """

    def __init__(self, network: Network, head: Sequential, growth: Growth):
        self.trunk, self.head, self.growth = network.trunk, head, growth
        self.taps = head.taps
        prepare(self.trunk, head)

    def reset(self, batch_size: int, cache: KVCache) -> None:
        self.streams = KVCache(batch_size, self.trunk.device)  # one layer a depth
        self.committed = Committed(batch_size)
        self.final: list[list[int]] = []  # by depth and row: slots that are final
        self.guess: Guess | None = None

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        self.committed.extend(tokens, states[self.trunk.num_layers], keep)

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        count = min(num_draft_tokens, max(context.room))
        if count <= 0 or not any(self.committed.lengths):
            return no_draft(root)
        self._confirm(root)
        self.final += [[0] * len(root) for _ in range(count - len(self.final))]
        self.streams.lengths = [min(slots) for slots in zip(*self.final[:count], strict=True)]
        room = drafting_room(context.room, self.committed.lengths)
        grow = self._chain if self.growth.is_chain else self._tree
        draft = grow(root, count, context, room)
        for depth in range(1, count + 1):
            self.final[depth - 1] = [final_slots(length, depth, 0) for length in self.committed.lengths]
        if self.growth.is_chain and root.is_cpu:  # elsewhere to look at tokens is to wait for them
            self.guess = Guess(self.committed.lengths, draft.tokens.tolist())
        return draft

    def _confirm(self, root: Tensor) -> None:
        """Slots of the last draft that were fed what has become the text are final too."""
        if self.guess is None:
            return
        for row, (start, guessed, last) in enumerate(zip(*self.guess, root.tolist(), strict=True)):
            became = [*self.committed.tokens[row, start + 1 : self.committed.lengths[row]].tolist(), last]
            right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(guessed, became, strict=False))))
            for depth in range(1, len(guessed) + 1):
                self.final[depth - 1][row] = final_slots(start, depth, right)
        self.guess = None

    def _line(self, root: Tensor, count: int) -> tuple[Tensor, Tensor, list[int]]:
        """Open slots of every row: tokens [B, W+count+1] up to the root, with places for what is drafted;
        the trunk's states [B, W, H]; the root's place in the line [B]."""
        line, hidden, here = self.committed.since(self.streams.lengths, beyond=count + 1)
        if len(set(here)) == 1:
            line[:, here[0]] = root
        else:
            line[torch.arange(len(root), device=root.device), torch.tensor(here, device=root.device)] = root
        return line, hidden, here

    def _chain(self, root: Tensor, count: int, context: Context, room: list[int]) -> Draft:
        """Modules 1 ... count over all open slots, each fed the tokens that those before it drafted."""
        line, hidden, here = self._line(root, count)
        kernel = depths_of(self.trunk, self.head, hidden)
        window = self.streams.open(hidden.shape[1], causal=kernel is not None)
        rotary = kernel.angles.of(window) if kernel else self.trunk.rotary(hidden, window.positions)
        last = columns_at(tuple(max(slot - 1, 0) for slot in here), root.device)
        columns = Columns(hidden, line, 1, last, rotary, window.mask, self.streams)
        if kernel is not None and context.takes_best:
            parents = straight(count, room, root.device)
            return Draft(kernel.greedy(columns, count), parents)
        drawn, rows, ends = Chain(context), torch.arange(len(root), device=root.device), last[:, 0] + 1
        for depth in range(1, count + 1):
            columns = dataclasses.replace(columns, states=hidden, offset=depth)
            hidden, logits = self._step(depth, columns, kernel)
            line[rows, ends + depth] = drawn.draw(logits[:, 0])
        return drawn.draft(room)

    def _step(self, depth: int, columns: Columns, kernel: Depths | None) -> tuple[Tensor, Tensor]:
        """Module `depth`: its states [B, W, H] and what it says of the columns read out [B, C, V]."""
        if kernel is None:
            return self.head.step(self.trunk, depth, columns)
        states, logits = kernel.logits(columns, depth)
        return states, logits[0]

    def _tree(self, root: Tensor, count: int, context: Context, room: list[int]) -> Draft:
        """Modules 1 ... count over all open slots and all nodes above the depth that they draft."""
        line, hidden, _ = self._line(root, count)
        nodes = Staggered(
            self.streams.lengths, self.committed.lengths, columns=hidden.shape[1], device=root.device
        )
        tree = self.growth.begin(root, context)
        for depth in range(1, count + 1):
            columns = self._columns(depth, nodes, line, hidden)
            hidden, logits = self._step(depth, columns, depths_of(self.trunk, self.head, columns.states))
            level = tree.expand(logits)
            if depth < count:
                nodes.add(level)
        return tree.draft(room)

    def _columns(self, depth: int, nodes: Staggered, line: Tensor, hidden: Tensor) -> Columns:
        """What module `depth` works on: states that the one before it left in its columns, and tokens."""
        tokens = torch.cat([line[:, depth : depth + len(nodes.line)], nodes.tokens], dim=1)
        window = nodes.open(depth, self.streams)
        states, read = picked(hidden, nodes.sources(depth)), nodes.columns(nodes.latest, depth)
        rotary = self.trunk.rotary(states, window.positions)
        return Columns(states, tokens, 0, read, rotary, window.mask, self.streams)

    def select(self, rows: Tensor) -> None:
        self.streams.select(rows)
        self.committed.select(rows)
        index = rows.tolist()
        self.final = [[slots[row] for row in index] for slots in self.final]
        if self.guess is not None:
            lengths, tokens = self.guess
            self.guess = Guess([lengths[row] for row in index], [tokens[row] for row in index])


def build(
    network: Network,
    widths: Sequence[int] | None = None,
    tree_nodes: int | None = None,
    top_k: int = 4,
) -> SequentialDrafter:
    """widths: children of every node at depth 0, 1, ..., a tree fixed before it is drawn; tree_nodes and
    top_k: EAGLE-2's tree. Without either a chain."""
    growth = read_growth(
        "sequential", network.trunk.vocab_size, widths=widths, tree_nodes=tree_nodes, top_k=top_k
    )
    return SequentialDrafter(network, need_head(network, "sequential"), growth)
