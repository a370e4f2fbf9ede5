"""Train networks alike, decode them alike, compare them in one table: `python ablate.py`.

`out` gets results.jsonl (a line for every row, as soon as it is done), table.md, report.html, and a folder
for every network that is trained. What is there already and was made from the same config is used, so an
ablation that was stopped goes on when it is started again.
"""

import entry  # first: it sets up Hydra's environment

# isort: split
import copy
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException
from transformers import AutoConfig, AutoModelForCausalLM

import ablation.drafters
import decode
from ablation.budget import BUDGETS
from ablation.drafters import drafter_maker, drafter_name
from ablation.runs import held_out, without_places
from ablation.session import Session
from ablation.shape import check_texts, stored
from ablation.tools import Tools
from decoding import Sampling
from decoding.loop import VERIFIERS
from decoding.requests import check_whole
from mtp import Network, Trunk, UserError
from mtp.network import load, resolve
from train import quiet, train
from training.config import check_choice
from training.prompts import prompts
from training.text import Document

__all__ = [
    "ablate", "compose", "cut_prompts", "drafter_config", "drafter_maker", "drafter_name", "held_out",
    "stored", "without_places",
]  # fmt: skip

LOADING = ("dtype", "device", "packed", "compile")
POSITIVE = (
    "prompts", "validation_prompts", "prompt_tokens", "max_new_tokens", "repeats", "threads", "longest",
    "loss_texts", "loss_tokens",
)  # fmt: skip


def ablate(config: dict[str, Any], argv: list[str]) -> None:
    """The whole table, from the composed config and the command line that led to it."""
    check_config(config)
    quiet()
    torch.set_num_threads(config["threads"])
    print(Session(config, argv, tools(config)).run())


def tools(config: dict[str, Any]) -> Tools:
    return Tools(compose, train, functools.partial(load_network, config), skeleton, Documents())


def load_network(config: dict[str, Any], model: str, heads: str | None) -> Network:
    return decode.load({"model": model, "heads": heads} | {key: config[key] for key in LOADING})


def skeleton(trunk: dict[str, Any], heads: dict[str, Any]) -> Network:
    """A network of this config as shapes alone: nothing is allocated."""
    with torch.device("meta"):
        if trunk["path"]:
            shape = load(AutoConfig.from_pretrained, resolve(trunk["path"]))
        else:
            shape = instantiate(trunk["config"])
        network = Network(Trunk(AutoModelForCausalLM.from_config(shape)))
        for name, head in heads.items():
            options = {key: value for key, value in head.items() if key != "loss"}
            network.heads[name] = instantiate(options, trunk=network.trunk)
    return network


class Documents:
    """The documents of a split, read once."""

    def __init__(self) -> None:
        self.data: Any = None

    def __call__(self, data: dict[str, Any], split: str) -> list[Document]:
        self.data = self.data or instantiate(data)
        return self.data.documents(split)


def drafter_config(wanted: Any, where: str) -> dict[str, Any]:
    return ablation.drafters.drafter_config(wanted, where, compose)


def compose(config_name: str, overrides: list[str], where: str) -> dict[str, Any]:
    """A config of conf/ as plain data; a mistake is told with the key that the overrides come from."""
    with apart():
        try:
            return copy.deepcopy(composed(config_name, tuple(overrides)))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{where}: {entry.told(error, config_name, overrides)}") from None


@functools.cache
def composed(config_name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(entry.CONF), version_base="1.3"):
        return entry.plain(hydra.compose(config_name, list(overrides)))


@contextmanager
def apart() -> Iterator[None]:
    """Put Hydra aside while it runs, so that other configs can be composed inside its main function."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def cut_prompts(network: Network, config: dict[str, Any]) -> list[list[int]]:
    if network.tokenizer is None:
        raise UserError("networks: one has no tokenizer, so no prompts can be cut for it")
    documents = instantiate(config["data"]).documents("held_out")
    cut = prompts(documents, config["prompts"], network.tokenizer, config["prompt_tokens"], config["seed"])
    return [prompt.token_ids for prompt in cut]


def check_config(config: dict[str, Any]) -> None:
    if not config["out"]:
        raise UserError("out is missing: say out=FOLDER, where the table is written")
    if not config["networks"] and not config["settings"]:
        raise UserError(
            "networks and settings are empty: an experiment names them, as experiment=ablation/smoke does"
        )
    for key in POSITIVE:
        check_whole(key, config[key], 1)
    for key in ("seed", "num_draft_tokens"):
        check_whole(key, config[key], 0)
    check_choice("verifier", config["verifier"], tuple(VERIFIERS))
    check_choice("dtype", config["dtype"], (None, *decode.DTYPES))
    check_choice("timed", config["timed"], (True, False))
    check_lists(config)
    decode.check_form(config)
    Sampling(temperature=config["temperature"])


def check_lists(config: dict[str, Any]) -> None:
    for key in ("train", "search", "only"):
        check_texts(key, config[key] or [])
    if config["seeds"] is not None:
        if not isinstance(config["seeds"], list) or not config["seeds"]:
            raise UserError(f"seeds={config['seeds']!r} is not a list of seeds, nor null")
        for seed in config["seeds"]:
            check_whole("seeds", seed, 0)
    every = [config["budgets"], *(setting.get("budgets") for setting in config["settings"].values())]
    for budgets in every:
        if budgets is not None and (not isinstance(budgets, list) or set(budgets) - set(BUDGETS)):
            raise UserError(f"budgets={budgets!r} is not a list of {', '.join(BUDGETS)}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    entry.run(functools.partial(ablate, argv=arguments), "ablate", arguments)
