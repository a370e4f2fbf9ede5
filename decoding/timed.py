"""A drafter with a stopwatch: how much of decoding's time is its own."""

import copy
import time
from itertools import pairwise

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.draft import Context, Draft, Drafter


class Timed:
    """Passes everything on to `drafter`; `seconds` is the time that this took since the last reset."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.taps = drafter.taps
        self.seconds = 0.0
        self.marks: list[float] = []  # `seconds` at the beginning of every step

    def __copy__(self) -> "Timed":
        return Timed(copy.copy(self.drafter))

    def reset(self, batch_size: int, cache: KVCache) -> None:
        began = now(cache.device)
        self.drafter.reset(batch_size, cache)
        self.seconds, self.marks = now(cache.device) - began, []

    def extend(self, tokens: Tensor, states: dict[int, Tensor], keep: Tensor) -> None:
        began = now(tokens.device)
        self.drafter.extend(tokens, states, keep)
        self.seconds += now(tokens.device) - began

    def propose(self, root: Tensor, num_draft_tokens: int, context: Context) -> Draft:
        self.marks.append(self.seconds)
        began = now(root.device)
        draft = self.drafter.propose(root, num_draft_tokens, context)
        self.seconds += now(root.device) - began
        return draft

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)

    def steps(self) -> list[float]:
        """Seconds inside the drafter by step, from its proposal up to the next."""
        return [end - start for start, end in pairwise([*self.marks, self.seconds])]


def now(device: torch.device) -> float:
    """The time, once a GPU has done what it was told; the loop waits for every draft and verdict anyway."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
