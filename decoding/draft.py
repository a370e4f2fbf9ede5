"""What a drafter hands to the loop and what the verifier hands back.

Shapes: B rows, N draft nodes, V vocabulary, H hidden size, W tokens given at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from decoding.cache import KVCache


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens as a tree under the root: the last emitted token, which is node 0 and not in `tokens`.

    q is the law that each token was really drawn from, given its ancestors and earlier siblings and after the
    same temperature and filters as the target's; None means that the drafts are deterministic.
    """

    tokens: Tensor  # [B, N]; node n >= 1 is tokens[:, n-1]
    parents: Tensor  # [B, N] parent node; 0 is the root, -1 unused
    q: Tensor | None = None  # [B, N, V]
    exit_layer: int = 0  # layers already run for root and nodes; their keys lie in the cache's scratch slots
    states: Tensor | None = None  # [B, N+1, H] root and nodes after exit_layer


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was accepted of a draft, and the token after it."""

    accepted: Tensor  # [B, N+1] bool, root True
    next_token: Tensor  # [B] bonus or recovered token


class Context(Protocol):
    """What a drafter may know of one step: every row's settings, seed and room."""

    room: list[int]  # [B] nodes that a row may still use

    @property
    def takes_best(self) -> bool:
        """Whether every token is the best of its logits as they are, so that nothing needs to be asked."""

    def law(self, logits: Tensor, path: Tensor) -> Tensor:
        """Logits [B, V] -> law [B, V] after each row's settings; path [B, k] are the drafted tokens before
        it."""

    def draw(self, law: Tensor, depth: int, node: int) -> tuple[Tensor, Tensor | None]:
        """Draw one token a row from law [B, V]; return tokens [B] and the q to declare (None:
        deterministic)."""

    def draw_siblings(
        self, law: Tensor, logits: Tensor, depth: int, nodes: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Draw as many different tokens as `nodes`; return tokens [B, C] and the q [B, C, V] to declare.

        logits [B, V] say which are best where the law has too few tokens, as a greedy one always has.
        """


class Drafter(Protocol):
    """Proposes tokens. `propose` writes scratch only; `extend` is told what became true.

    `copy.copy` of a drafter must be another that, once it is reset, shares nothing but weights with the
    first: `reset` sets all that changes anew, and what outlives a reset (remembered outputs) is not copied.
    """

    taps: tuple[int, ...]  # trunk layers whose output it reads; L is after the final norm

    def reset(self, batch_size: int, cache: "KVCache") -> None: ...

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        """Committed tokens: those of tokens [B, W] with keep [B, W] (bool, on the CPU), states [B, W, H] by
        tap."""

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        """Draft at most num_draft_tokens after root [B]."""

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order (indices on the CPU)."""


def chain(tokens: list[Tensor], laws: list[Tensor | None], room: list[int]) -> Draft:
    """A draft without branches from one [B] tensor of tokens and one law a depth; nodes beyond a row's room
    are unused.

    >>> chain([torch.tensor([5, 6]), torch.tensor([7, 8])], [None, None], [2, 1]).parents
    tensor([[ 0,  1],
            [ 0, -1]])
    """
    drawn = [law for law in laws if law is not None]
    stacked = torch.stack(tokens, dim=1)
    parents = line_parents(room, len(tokens), stacked.device)
    return Draft(stacked, parents, torch.stack(drawn, dim=1) if drawn else None)


def line_parents(counts: list[int], width: int, device: torch.device) -> Tensor:
    """Parents [B, width] of chains of so many nodes."""
    lines = [[node if node < count else -1 for node in range(width)] for count in counts]
    return torch.tensor(lines, device=device)


def looked_up(found: list[list[int]], root: Tensor) -> Draft:
    """A deterministic draft from one list of tokens a row, of any lengths, after root [B].

    >>> looked_up([[5, 6], []], torch.tensor([1, 2])).parents
    tensor([[ 0,  1],
            [-1, -1]])
    """
    width = max(map(len, found))
    if width == 0:
        return no_draft(root)
    padded = torch.tensor([line + [0] * (width - len(line)) for line in found], device=root.device)
    return Draft(padded, line_parents(list(map(len, found)), width, root.device))


def no_draft(root: Tensor) -> Draft:
    """Nothing drafted after root [B]: plain decoding's draft."""
    empty = root.new_empty(len(root), 0)
    return Draft(empty, empty)


class Autoregressive:
    """The drafter of plain decoding: it never drafts."""

    taps: tuple[int, ...] = ()

    def reset(self, batch_size: int, cache: "KVCache") -> None:
        pass

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        pass

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        return no_draft(root)

    def select(self, rows: Tensor) -> None:
        pass
