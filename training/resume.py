"""Going on from a checkpoint: where it lies, how far it was, and whether it fits."""

from pathlib import Path
from typing import Any

import torch

from mtp import UserError
from training.callbacks import Best
from training.module import Training


def find_checkpoint(resume: bool | str | None, run_dir: Path) -> Path | None:
    """The checkpoint to go on from: `true` is the run folder's own, anything else is a path."""
    if resume in (False, None):
        return None
    path = run_dir / "checkpoints" / "last.ckpt" if resume is True else Path(str(resume))
    if not path.is_file():
        raise UserError(
            f"resume={str(resume).lower() if resume is True else resume}: there is no checkpoint {path}"
        )
    return path


def read_step(checkpoint: Path | None) -> int:
    """How many steps lie behind it."""
    return read(checkpoint)["global_step"] if checkpoint is not None else 0


def read(checkpoint: Path) -> dict[str, Any]:
    try:
        stored = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return {key: stored[key] for key in ("global_step", "state_dict")}
    except Exception as error:
        raise UserError(f"resume: {checkpoint} is not a whole checkpoint ({type(error).__name__})") from error


def check_fits(checkpoint: Path | None, module: Training) -> None:
    """UserError where the checkpoint holds other weights than this run trains."""
    if checkpoint is None:
        return
    there = {name: value.shape for name, value in read(checkpoint)["state_dict"].items()}
    here = {name: value.shape for name, value in module.kept(module.state_dict()).items()}
    odd = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    if odd:
        raise UserError(
            f"resume: {checkpoint} is of another network: {odd[0]} is "
            f"{said(there.get(odd[0]))} there and {said(here.get(odd[0]))} here"
        )


def said(shape: torch.Size | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


def find_best(select: str, path: Path, checkpoint: Path | None, first_step: int) -> Best | None:
    """What keeps the best network, knowing what the run that goes on had found by then."""
    if select == "last":
        return None
    best = Best(path, select)
    best.recall(first_step if checkpoint is not None and checkpoint.parent == path.parent else 0)
    return best
