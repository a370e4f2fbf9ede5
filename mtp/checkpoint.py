"""Head files beside a trunk: folder/heads/<name>/{config.json, model.safetensors, provenance.json}."""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from mtp.errors import UserError
from mtp.trunk import Trunk

WEIGHTS = "model.safetensors"


def fingerprint(folder: Path) -> str:
    """SHA-256 of the trunk's stored tensors: names, dtypes, shapes and bytes, in the order of their names.

    It is of what lies on the disk, so it does not change with the dtype that the trunk is loaded in.
    """
    where = {name: path for path in weight_files(folder) for name in tensor_names(path)}
    digest = hashlib.sha256()
    for name in sorted(where):
        with safe_open(where[name], "pt") as file:
            tensor = file.get_tensor(name).contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(f"model: {folder} has no model*.safetensors file")
    return files


def tensor_names(path: Path) -> list[str]:
    """The names in a safetensors file; a file that is missing or cut off raises UserError."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"model: {path} is not a whole safetensors file ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model: {path} cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"model: {path} holds a {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


def save_head(
    folder: Path, head: nn.Module, trunk: str, dtype: torch.dtype, provenance: dict[str, Any]
) -> None:
    """Write one head into `folder` (its own); `trunk` is the fingerprint of the trunk that it belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / "config.json", {"kind": head.kind, "options": head.options, "trunk": trunk})
    write_json(folder / "provenance.json", provenance | {"trunk": trunk})


def check_head(folder: Path, trunk: str) -> None:
    """Refuse a head whose files are incomplete or that was trained on another trunk, before anything is
    loaded."""
    if "." in folder.name:
        raise UserError(f"model: {folder} cannot be a head, for a head's name has no dot; move it elsewhere")
    config = read_json(folder / "config.json")
    for key, kind in {"kind": str, "options": dict, "trunk": str}.items():
        if not isinstance(config.get(key), kind):
            found = repr(config[key]) if key in config else "nothing"
            raise UserError(f"model: {folder / 'config.json'} has {found} as {key!r}, not a {kind.__name__}")
    tensor_names(folder / WEIGHTS)
    if config["trunk"] != trunk:
        raise UserError(
            f"model: head {folder} is of trunk {config['trunk'][:12]}, but this trunk is {trunk[:12]}"
        )


def load_head(folder: Path, trunk: Trunk) -> nn.Module:
    """Build the head that `folder` describes on `trunk`, with its weights, in the trunk's dtype and place."""
    config = read_json(folder / "config.json")
    try:
        head = build_head(config["kind"], trunk, **config["options"])
        head.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"model: {folder / WEIGHTS} does not fit its config.json ({one_line(error)})"
        ) from None
    return head.to(device=trunk.device, dtype=trunk.dtype)


def build_head(kind: str, trunk: Trunk, **options: Any) -> nn.Module:
    """A name is a module: kind "sequential" is built by mtp.sequential.build."""
    try:
        module = importlib.import_module(f"mtp.{kind}")
    except ModuleNotFoundError:
        raise UserError(f"head: {kind!r} is not a kind of head") from None
    if not hasattr(module, "build"):
        raise UserError(f"head: {kind!r} is not a kind of head")
    return module.build(trunk, **options)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
