"""The committed tokens of every row and the trunk states that a head reads, by position.

Shapes: B rows, W tokens given at once, H hidden size.
"""

import torch
from torch import Tensor


class Committed:
    """Grows by `extend`; `since` hands out everything from a position on, left-aligned, for a head to catch
    up."""

    def __init__(self, batch_size: int, capacity: int = 64):
        self.lengths = [0] * batch_size
        self.capacity = capacity
        self.tokens = torch.empty(batch_size, 0, dtype=torch.long)  # [B, capacity]
        self.states = torch.empty(batch_size, 0, 0)  # [B, capacity, H], of the first states' kind

    def extend(self, tokens: Tensor, states: Tensor, keep: Tensor) -> None:
        """Append, row by row, the entries of tokens [B, W] and states [B, W, H] with keep [B, W] (bool,
        CPU)."""
        lines = keep.tolist()
        counts = [sum(line) for line in lines]
        most, first = max(counts, default=0), self.lengths[0] if self.lengths else 0
        self._reserve(max(self.lengths, default=0) + most, tokens, states)
        even = len(set(counts)) <= 1 and len(set(self.lengths)) <= 1
        if even and not any(True in line[most:] for line in lines):  # one slice for all rows
            self.tokens[:, first : first + most] = tokens[:, :most]
            self.states[:, first : first + most] = states[:, :most]
        else:
            self._scatter(keep, most, tokens, states)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def _scatter(self, keep: Tensor, most: int, tokens: Tensor, states: Tensor) -> None:
        order = keep.long().argsort(dim=1, descending=True, stable=True)[:, :most].to(tokens.device)
        rows = torch.arange(len(keep), device=tokens.device)[:, None]
        starts = torch.tensor(self.lengths, device=tokens.device)[:, None]
        slots = starts + torch.arange(most, device=tokens.device)
        self.tokens[rows, slots] = tokens[rows, order]
        self.states[rows, slots] = states[rows, order]

    def _reserve(self, size: int, tokens: Tensor, states: Tensor) -> None:
        if size > self.tokens.shape[1]:
            self.capacity = self.capacity if size <= self.capacity else max(size, 2 * self.capacity)
            self.tokens = grown(self.tokens, tokens, self.capacity)
            self.states = grown(self.states, states, self.capacity)

    def since(self, starts: list[int], beyond: int = 0) -> tuple[Tensor, Tensor, list[int]]:
        """Tokens [B, W + beyond] and states [B, W, H] from position starts[r] on, and how many of the W
        belong to each row. To be read only, but for tokens behind a row's own, which are anybody's.

        Rows with 5 and 3 committed tokens, starts [3, 2]: W = 2, counts [2, 1].
        """
        counts = [length - start for length, start in zip(self.lengths, starts, strict=True)]
        most = max(counts)
        self._reserve(max(starts) + most + beyond, self.tokens, self.states)
        if len(set(starts)) == 1:
            first, last = starts[0], starts[0] + most
            return self.tokens[:, first : last + beyond], self.states[:, first:last], counts
        offsets = torch.arange(most + beyond, device=self.tokens.device)
        slots = torch.tensor(starts, device=self.tokens.device)[:, None] + offsets
        rows = torch.arange(len(counts), device=slots.device)[:, None]
        return self.tokens[rows, slots], self.states[rows, slots[:, :most]], counts

    def select(self, rows: Tensor) -> None:
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        index = rows.to(self.tokens.device)
        self.tokens, self.states = self.tokens[index], self.states[index]


def grown(old: Tensor, like: Tensor, capacity: int) -> Tensor:
    """A buffer [B, capacity, ...] of like's kind that begins with `old`."""
    new = like.new_zeros(like.shape[0], capacity, *like.shape[2:])
    if old.shape[1]:
        new[:, : old.shape[1]] = old
    return new
