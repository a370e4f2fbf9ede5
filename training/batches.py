"""Batches of packed rows, in an order that the seed and the step alone determine.

Letters: B rows a batch, T tokens a row, H hidden size.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from training.packing import PADDING, Rows
from training.states import WithStates

# "tokens" and "documents" [B, T]; "mask" [B, T] where not all is learned; "state_<tap>" [B, T, H] from disk
Batch = dict[str, Tensor]


class Share:
    """The rows of process r of R for validation: r, r+R, ..., as many for every process.

    Where rows do not go round, the last one is blank (no token of it has a document), so that none counts
    twice and no process waits for another. 5 rows over 2 processes: 0 2 4 and 1 3 blank.
    """

    def __init__(self, rows: Rows | WithStates, rank: int, ranks: int):
        self.rows, self.rank, self.ranks = rows, rank, ranks

    def __len__(self) -> int:
        return -(-len(self.rows) // self.ranks)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        if not 0 <= place < len(self):
            raise IndexError(place)
        row = place * self.ranks + self.rank
        if row < len(self.rows):
            return self.rows[row]
        blank = self.rows[0]
        return blank | {"documents": torch.full_like(blank["documents"], PADDING)}


class BatchStream:
    """Batches without end: batch s is a function of (seed, s), and each epoch is a permutation of all rows.

    `step` is the number of the next batch to be trained on, and the whole state. Whoever trains counts it on
    (with Lightning, TextData does). Reading a batch does not, because Lightning reads one ahead.
    """

    def __init__(self, rows: Rows | WithStates, batch_size: int, seed: int, *, rank: int = 0, ranks: int = 1):
        self.rows, self.batch_size, self.seed, self.rank, self.ranks = rows, batch_size, seed, rank, ranks
        self.step = 0
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, itertools.count(self.step))

    def batch(self, step: int) -> Batch:
        """Batch number `step`: `tokens` and `documents` [B, T] each, and what else the rows have."""
        first = (step * self.ranks + self.rank) * self.batch_size
        rows = [self.rows[self._row(first + place)] for place in range(self.batch_size)]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def _row(self, place: int) -> int:
        """The row at this place of the endless sequence of permutations."""
        epoch, place = divmod(place, len(self.rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return int(self._order[place])
