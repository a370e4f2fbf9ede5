"""Network: a trunk and its named heads, in a Hugging Face folder on disk."""

import copy
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mtp import fused, graphs, kernel, packed
from mtp.checkpoint import (
    check_head,
    fingerprint,
    load_head,
    one_line,
    save_head,
    tensor_names,
    weight_files,
    write_json,
)
from mtp.compiled import CompiledLayer, compile_modules
from mtp.errors import UserError
from mtp.fast_layer import FastLayer, pack, restore
from mtp.fused import Tell
from mtp.graphs import CapturedLayer, capture_modules
from mtp.trunk import Trunk, check_architecture


class Network(nn.Module):
    """A trunk, the heads on it by name, and the tokenizer if there is one."""

    def __init__(self, trunk: Trunk, heads: dict[str, nn.Module] | None = None, tokenizer: Any = None):
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict(heads or {})
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        heads: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Load a folder (or hub id) with all its heads; `heads` names another folder to take heads from as
        well.

        dtype None keeps what the folder says. UserError where the folder is missing, incomplete or of an
        architecture that is not supported, or where a head was trained on another trunk.
        """
        path = resolve(folder)
        check_architecture(load(AutoConfig.from_pretrained, path))
        head_folders = find_heads(path) | (find_heads_of(heads) if heads else {})
        for file in weight_files(path):
            tensor_names(file)
        if head_folders:
            trunk_fingerprint = fingerprint(path)
            for head_folder in head_folders.values():
                check_head(head_folder, trunk_fingerprint)
        trunk = Trunk(load_model(path, dtype, device))
        loaded = {name: load_head(head_folder, trunk) for name, head_folder in head_folders.items()}
        return cls(trunk, loaded, load_tokenizer(path)).eval()

    @property
    def form(self) -> str:
        """How the weights lie: "plain", "packed", "compiled" or "captured"."""
        kinds = {FastLayer: "packed", CompiledLayer: "compiled", CapturedLayer: "captured"}
        return kinds.get(type(self.trunk.layers[0]), "plain")

    def pack(self) -> str | None:
        """Make decoding on a CPU fast: layers and matrices of trunk and heads in oneDNN's layout, in place.

        Outputs stay the same up to float32 rounding. Nothing is done where that cannot be; the reason is
        returned, None means packed. A packed network can be neither trained nor saved nor moved; `unpack`
        undoes it.
        """
        if (reason := packed.why_not(self.trunk.device, self.trunk.dtype)) is None:
            self.unpack()
            pack(self, self.trunk)
        return reason

    def compile_kernel(self) -> str | None:
        """As `pack`, faster, with a C++ kernel that is built on first use; a compiler is needed."""
        trunk = self.trunk
        if reason := kernel.why_not(trunk.device, trunk.dtype, trunk.config):
            return reason
        try:
            kernel.library()  # before anything is replaced
        except UserError as error:
            return str(error)
        self.unpack()
        compile_modules(self, trunk)
        return None

    def capture_graphs(self, tell: Tell = lambda _: None) -> str | None:
        """Make decoding on a CUDA device fast: layers of trunk and heads as graphs that are captured on first
        use, and compiled first where Triton is there; `tell` hears how far that is. Otherwise as `pack`."""
        trunk = self.trunk
        if (reason := graphs.why_not(trunk.device, trunk.config)) is None:
            self.unpack()
            capture_modules(self, trunk, tell if fused.fusing() else None)
        return reason

    def take_form(self, form: str) -> str | None:
        """Bring the weights into another network's `form`, where that can be; else the reason."""
        forms = {"packed": self.pack, "compiled": self.compile_kernel, "captured": self.capture_graphs}
        return forms.get(form, self.unpack)()

    def unpack(self) -> None:
        """Undo `pack`, `compile_kernel` or `capture_graphs`: every weight in its own module, bit for bit."""
        restore(self)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        """Write trunk, tokenizer and heads into `folder`; files of ours are replaced, others stay.

        Everything is written beside the folder first and moved in when it is whole. dtype None keeps each as
        it is.
        """
        if self.form != "plain":
            packed.refuse()
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            self._write(Path(temporary), dtype or self.trunk.dtype, provenance or {})
            move_into(Path(temporary), folder)

    def _write(self, folder: Path, dtype: torch.dtype, provenance: dict[str, Any]) -> None:
        model = self.trunk.model
        if dtype != model.dtype:
            model = copy.deepcopy(model).to(dtype)
        model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        trunk_fingerprint = fingerprint(folder)
        write_json(folder / "provenance.json", provenance | {"trunk": trunk_fingerprint})
        for name, head in self.heads.items():
            save_head(folder / "heads" / name, head, trunk_fingerprint, dtype, provenance)


def resolve(folder: str | os.PathLike[str]) -> Path:
    """The local folder of a path or hub id."""
    path = Path(folder)
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "heads").is_dir():
            raise UserError(f"model: {path} has no config.json, so it is not a network folder")
        return path
    name = str(folder)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"model: {name} is not a network folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx"]))
    except Exception as error:
        raise UserError(
            f"model: {name} is no folder here and cannot be had from a hub ({one_line(error)[:120]})"
        ) from None


def find_heads(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted((folder / "heads").glob("[!.]*")) if path.is_dir()}


def find_heads_of(folder: str | os.PathLike[str]) -> dict[str, Path]:
    if not (found := find_heads(resolve(folder))):
        raise UserError(f"heads: {folder} has no heads")
    return found


def load(function: Any, path: Path, **options: Any) -> Any:
    """A loader of transformers', its many exceptions told as one line and its own report left out."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        return function(path, local_files_only=True, **options)
    except Exception as error:  # of many kinds: a config's values are only used, never checked
        raise UserError(f"model: {path} cannot be loaded ({one_line(error)[:160]})") from None
    finally:
        transformers.logging.set_verbosity(verbosity)


def load_model(path: Path, dtype: Any, device: Any) -> Any:
    model, info = load(
        AutoModelForCausalLM.from_pretrained,
        path,
        dtype=dtype or "auto",
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,  # told below instead
        output_loading_info=True,
    )
    for what, names in (("lacks", info["missing_keys"]), ("has the wrong size of", info["mismatched_keys"])):
        if bad := sorted(name if isinstance(name, str) else name[0] for name in names):
            raise UserError(f"model: {path} {what} the weights {bad[0]} and {len(bad) - 1} more")
    check_all_layers_used(path, len(model.model.layers), info["unexpected_keys"])
    return model.to(device) if device else model


def check_all_layers_used(path: Path, num_layers: int, left_out: Iterable[str]) -> None:
    """UserError where the file has layers that the config does not count: such a trunk would be cut short."""
    found = [re.match(r"model\.layers\.(\d+)\.", name) for name in left_out]
    if beyond := sorted(int(match[1]) for match in found if match):
        raise UserError(
            f"model: {path} has weights of layer {beyond[0]}, but its config.json says {num_layers} layers"
        )


def load_tokenizer(path: Path) -> Any:
    """The folder's tokenizer, or None where it has none."""
    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        return None
    return load(AutoTokenizer.from_pretrained, path)


def move_into(source: Path, target: Path) -> None:
    """Move the files of a whole tree into place, directory by directory, each file in one rename.

    Weights come from safetensors readable by their owner alone; here all get what the umask allows.
    """
    os.umask(umask := os.umask(0o022))
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            path.chmod(0o666 & ~umask)
            shutil.move(path, place)
