"""The states of a frozen trunk on disk: computed once for all rows, then read instead of run.

One file a tap, rows one after the other, so that what a stopped run wrote is kept and the next one appends.
Letters: N rows, T tokens a row, H hidden size.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from mtp import Trunk, UserError
from training.cache import cache_folder, digest, locked
from training.packing import Rows
from training.progress import shown, tell
from training.targets import may_see

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be kept: the trunk with the fingerprint of its file, the tapped layers, the dtype's name.

    `precision` names how the run computes (autocast or not), and `computing()` makes it so while it lasts.
    """

    trunk: Trunk
    fingerprint: str
    taps: tuple[int, ...]
    dtype: str
    precision: str = "32-true"
    computing: Callable[[], AbstractContextManager[None]] = nullcontext

    def bytes_of_row(self, row_length: int) -> int:
        """In one tap's file."""
        return row_length * self.trunk.hidden_size * DTYPES[self.dtype].itemsize


class WithStates:
    """Rows that bring their states along: `state_<tap>` [T, H] beside what the rows have themselves."""

    def __init__(self, rows: Rows, states: dict[int, Tensor]):
        self.rows, self.states = rows, states  # tap -> [N, T, H], mapped from disk

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        found = self.rows[row]
        return found | {f"state_{tap}": state[row].clone() for tap, state in self.states.items()}


def folder_of(wanted: Wanted, rows: Rows, cache_dir: str | None) -> Path:
    """Where the states of these rows lie; the name changes with all that they depend on."""
    key = digest("states", wanted.fingerprint, rows.key, wanted.dtype, wanted.precision)
    return cache_folder(cache_dir) / f"states-{key}"


def with_states(wanted: Wanted, rows: Rows, cache_dir: str | None = None) -> WithStates:
    """The rows with the states that `write_states` left on disk."""
    folder, shape = folder_of(wanted, rows, cache_dir), (len(rows), rows.row_length, wanted.trunk.hidden_size)
    states = {}
    for tap in wanted.taps:
        count = shape[0] * shape[1] * shape[2]
        flat = torch.from_file(str(folder / f"tap{tap}"), size=count, dtype=DTYPES[wanted.dtype])
        states[tap] = flat.view(shape)
    return WithStates(rows, states)


def write_states(wanted: Wanted, rows: Rows, cache_dir: str | None = None) -> Path:
    """Run the trunk over all rows, as far as their states are not there yet; the folder that holds them.

    UserError where the disk has not enough room, or where a state is too large for float16.
    """
    folder, size = folder_of(wanted, rows, cache_dir), wanted.bytes_of_row(rows.row_length)
    files = {tap: folder / f"tap{tap}" for tap in wanted.taps}
    with locked(folder / "lock"):
        missing = {tap: path for tap, path in files.items() if length(path) < size * len(rows)}
        if missing:
            announce(folder, sum(size * len(rows) - length(path) for path in missing.values()), len(rows))
            append(wanted, rows, missing, min(length(path) for path in missing.values()) // size)
    return folder


def append(wanted: Wanted, rows: Rows, files: dict[int, Path], first: int) -> None:
    """Write the states of rows first, first+1, ... behind those that the files have already."""
    size = wanted.bytes_of_row(rows.row_length)
    with ExitStack() as stack:
        opened = {tap: stack.enter_context(path.open("ab")) for tap, path in files.items()}
        for file in opened.values():
            file.truncate(first * size)  # a row that was cut off, or that another tap does not have
        for some in shown(list(batches(range(first, len(rows)), rows.row_length)), "states of the trunk"):
            for tap, state in tapped(wanted, [rows[row] for row in some]).items():
                if tap in opened:
                    store(opened[tap], state, DTYPES[wanted.dtype])


@torch.inference_mode()
def tapped(wanted: Wanted, rows: list[dict[str, Tensor]]) -> dict[int, Tensor]:
    """tap -> [B, T, H], exactly what training would have the trunk compute."""
    trunk = wanted.trunk
    batch = {key: torch.stack([row[key] for row in rows]).to(trunk.device) for key in rows[0]}
    with wanted.computing():
        return trunk(batch["tokens"], mask=may_see(batch), taps=wanted.taps, logits=False).states


def store(file: IO[bytes], state: Tensor, dtype: torch.dtype) -> None:
    small = state.to(dtype)
    if not bool(small.isfinite().all()):
        raise UserError(
            f"data.states={str(dtype).removeprefix('torch.')} cannot hold a state of size "
            f"{state.abs().max().item():.3g}; bfloat16 and float32 can"
        )
    file.write(small.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    file.flush()


def announce(folder: Path, needed: int, count: int) -> None:
    """Say what will be written where, or refuse when the disk has less."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"data.states: the states of {count} rows take {needed / 1e9:.1f} GB more in {folder}, "
            f"and the disk has {free / 1e9:.1f} GB; use fewer rows (data.max_bytes) or a smaller dtype"
        )
    tell(f"the states of {count} rows: {needed / 1e6:.1f} MB are written to {folder}")


def batches(numbers: Sequence[int], row_length: int) -> Iterator[Sequence[int]]:
    count = max(1, TOKENS_AT_ONCE // row_length)
    return (numbers[at : at + count] for at in range(0, len(numbers), count))


def length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
