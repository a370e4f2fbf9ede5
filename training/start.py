"""The network that a run begins with: a new trunk, or one from a folder with the heads that it has."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from mtp import Network, Trunk, UserError
from mtp.network import load_tokenizer, resolve


def new_network(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Network:
    """A trunk of this shape with fresh weights in float32, for this tokenizer."""
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = (
        None  # a padding row of the embedding would be kept at zero, and here end is padding too
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return Network(Trunk(model), {}, tokenizer)


def load_network(path: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Network:
    """A folder's trunk, heads and tokenizer in float32; `tokenizer` stands in where the folder has none."""
    network = Network.from_pretrained(path, dtype=torch.float32)
    network.tokenizer = network.tokenizer or tokenizer
    if network.tokenizer is None:
        raise UserError(f"trunk.path: {path} has no tokenizer; say trunk.tokenizer=FOLDER")
    if len(network.tokenizer) > network.trunk.vocab_size:
        raise UserError(
            f"trunk.path: {path} has a tokenizer of {len(network.tokenizer)} symbols, "
            f"but its trunk knows only {network.trunk.vocab_size}"
        )
    return network


def tokenizer_of(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a network folder."""
    if not Path(folder).is_dir():
        raise UserError(f"trunk.tokenizer: {folder} is not a folder")
    if (tokenizer := load_tokenizer(Path(folder))) is None:
        raise UserError(f"trunk.tokenizer: {folder} has no tokenizer")
    return tokenizer


def stored_dtype(path: str) -> torch.dtype:
    """The dtype that the trunk of a network folder or hub id is stored in."""
    try:
        config = json.loads((resolve(path) / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return torch.float32
    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))


def head_provenance(path: str, names: list[str]) -> dict[str, Any]:
    """provenance.json of the named heads of a folder, to be kept when the heads are saved again."""
    files = {name: resolve(path) / "heads" / name / "provenance.json" for name in names}
    return {
        name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()
    }
