"""Other packages that decode the same checkpoint, each behind one function: prompt ids -> new ids, greedily.

Each package gets a model of its own, as transformers loads it, so that nothing we or another package did to
its weights or layers counts. A function whose package is not installed is never called.
"""

import functools
import importlib.util
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decoding.contest import Run
from mtp import UserError
from mtp.errors import check_whole

Write = Callable[[list[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What every package is told: the folder, the type of its weights, the device, where texts end."""

    folder: str
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]

    def model(self) -> Any:
        """The model as transformers loads it."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).to(self.device).eval()

    def ids(self, prompt: list[int]) -> Tensor:
        return torch.tensor([prompt], device=self.device)  # [1, T]


class Peer:
    """A contender that only tells its tokens."""

    def __init__(self, name: str, write: Write):
        self.name, self.write = name, write

    def __call__(self, prompt: list[int], max_new_tokens: int) -> Run:
        began = time.perf_counter()
        tokens = self.write(prompt, max_new_tokens)  # in a list, so a GPU is done
        return Run(tokens, time.perf_counter() - began)


@functools.lru_cache(maxsize=1)
def unmodified(checkpoint: Checkpoint) -> Any:
    """The one model of transformers' own ways to decode."""
    return checkpoint.model()


def transformers(checkpoint: Checkpoint) -> Write:
    """transformers' generate."""
    return with_generate(checkpoint, unmodified(checkpoint))


def transformers_lookup(checkpoint: Checkpoint, num_tokens: int = 5) -> Write:
    """transformers' prompt lookup."""
    check_whole("peers: num_tokens", num_tokens, 1)
    return with_generate(checkpoint, unmodified(checkpoint), prompt_lookup_num_tokens=num_tokens)


def transformers_early_exit(checkpoint: Checkpoint, exit_layer: int | None = None) -> Write:
    """transformers' early exit; exit_layer None: half of the layers."""
    model = unmodified(checkpoint)
    layers = model.config.num_hidden_layers
    exit_layer = layers // 2 if exit_layer is None else exit_layer
    check_whole("peers: exit_layer", exit_layer, 1, layers - 1)
    return with_generate(checkpoint, model, assistant_early_exit=exit_layer)


def economize_lookup(checkpoint: Checkpoint, num_tokens: int = 6, max_ngram: int = 3) -> Write:
    """economize's prompt lookup, by its `decode`; its `generate` refuses what transformers 5.24 gives it."""
    economize = importlib.import_module("economize")
    lookup = importlib.import_module("economize.techniques.lookup")
    config = lookup.LookupConfig(max_ngram=max_ngram)
    model = economize.apply(
        checkpoint.model(), config, decoding=economize.DecodeConfig(cycle_length=num_tokens)
    )
    stop = list(checkpoint.eos_token_ids) or None

    def write(prompt: list[int], max_new_tokens: int) -> list[int]:
        return model.decode(checkpoint.ids(prompt), max_new_tokens, stop=stop).tokens.tolist()

    return write


def flashspec_lookup(checkpoint: Checkpoint, num_tokens: int = 6) -> Write:
    """flashspec's prompt lookup."""
    flashspec = importlib.import_module("flashspec")
    engine = importlib.import_module("flashspec.engine")
    model = checkpoint.model()
    target = engine.TargetModel(checkpoint.folder, checkpoint.device, checkpoint.dtype, model=model)
    config = flashspec.FlashSpecConfig(
        device=str(checkpoint.device),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        drafter_strategy="bandit",
        bandit=flashspec.BanditConfig(n_arms=1),
        sampling=flashspec.SamplingConfig(temperature=0.0, gamma=num_tokens),
        eos_token_ids=checkpoint.eos_token_ids,
    )
    speculative = flashspec.SpeculativeEngine(config, [engine.NgramDrafter()], target)

    def write(prompt: list[int], max_new_tokens: int) -> list[int]:
        done = speculative.generate(checkpoint.ids(prompt), max_new_tokens=max_new_tokens)
        return done.output_ids[0, : done.n_tokens_generated].tolist()

    return write


def vllm(checkpoint: Checkpoint, **engine: Any) -> Write:
    """vLLM, plain."""
    package = importlib.import_module("vllm")
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    model = package.LLM(model=checkpoint.folder, dtype=dtype, enable_prefix_caching=False, **engine)
    stops = {"stop_token_ids": list(checkpoint.eos_token_ids), "ignore_eos": not checkpoint.eos_token_ids}

    def write(prompt: list[int], max_new_tokens: int) -> list[int]:
        settings = package.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, **stops)
        done = model.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
        return list(done[0].outputs[0].token_ids)

    return write


def vllm_lookup(checkpoint: Checkpoint, num_tokens: int = 5, max_ngram: int = 4) -> Write:
    """vLLM's lookup of n-grams."""
    config = {"method": "ngram", "num_speculative_tokens": num_tokens, "prompt_lookup_max": max_ngram}
    return vllm(checkpoint, speculative_config=config)


PEERS: dict[str, Callable[..., Write]] = {
    function.__name__: function
    for function in (
        transformers,
        transformers_lookup,
        transformers_early_exit,
        economize_lookup,
        flashspec_lookup,
        vllm,
        vllm_lookup,
    )
}


def with_generate(checkpoint: Checkpoint, model: Any, **options: Any) -> Write:
    """A model with transformers' `generate`."""
    eos = list(checkpoint.eos_token_ids)

    def write(prompt: list[int], max_new_tokens: int) -> list[int]:
        ids = checkpoint.ids(prompt)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
            eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, **options,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    return write


def missing(name: str) -> str | None:
    """The package that a peer needs and that is not installed."""
    package = package_of(name)
    return None if importlib.util.find_spec(package) else package


def package_of(name: str) -> str:
    """
    >>> package_of("transformers_early_exit")
    'transformers'
    """
    return name.partition("_")[0]


def check_peer(name: str, options: dict[str, Any]) -> None:
    """UserError for a peer or an option that there is not."""
    if name not in PEERS:
        raise UserError(f"peers: {name!r} is not one of {', '.join(PEERS)}")
    kinds = inspect.signature(PEERS[name]).parameters.values()
    known = [kind.name for kind in kinds if kind.default is not kind.empty]
    for option in options:
        if option not in known:
            raise UserError(f"peers: {name} has no option {option}; it has {', '.join(known) or 'none'}")


def build_peer(label: str, name: str, checkpoint: Checkpoint, options: dict[str, Any]) -> Peer:
    return Peer(label, PEERS[name](checkpoint, **options))
