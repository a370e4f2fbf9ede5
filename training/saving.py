"""What a run leaves behind: a network folder, or the trained heads alone."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from mtp import Network
from mtp.checkpoint import fingerprint, save_head
from mtp.network import move_into, resolve
from training.provenance import provenance
from training.start import head_provenance, stored_dtype

SAVE = ("network", "heads")


def save(network: Network, config: dict[str, Any], validation: dict[str, float]) -> None:
    """Write what `config["save"]` asks for into `config["out"]`."""
    trunk, out = config["trunk"], Path(config["out"])
    stored = stored_dtype(trunk["path"]) if trunk["path"] else torch.float32
    dtype = getattr(torch, config["save_dtype"]) if config["save_dtype"] else stored
    made = provenance(config, validation)
    if config["save"] == "heads":
        save_heads(network, sorted(config["heads"]), out, dtype=dtype, made=made, trunk=trunk["path"])
        return
    kept = sorted(set(network.heads) - set(config["heads"]))
    origins = head_provenance(trunk["path"], kept) if trunk["path"] else {}
    network.save_pretrained(out, dtype=dtype, provenance=made)
    for name, value in origins.items():  # a head that was not trained here keeps its own
        file = out / "heads" / name / "provenance.json"
        file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def save_heads(
    network: Network, names: list[str], out: Path, *, dtype: torch.dtype, made: dict[str, Any], trunk: str
) -> None:
    """Only `out`/heads/<name>, for `decode.py model=<trunk> heads=<out>`; whole or not at all."""
    belongs_to = fingerprint(resolve(trunk))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        for name in names:
            save_head(Path(temporary, "heads", name), network.heads[name], belongs_to, dtype, made)
        move_into(Path(temporary), out)
