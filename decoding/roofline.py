"""How fast decoding could be here: what a step has to read, and how fast this machine reads."""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from decoding.timed import now
from mtp import Network
from mtp.compiled import stacks
from mtp.large_pages import large_pages

ARRAY_BYTES = 512 * 2**20  # far more than any processor's caches hold
READS = 9


def bandwidth(device: torch.device, array_bytes: int = ARRAY_BYTES) -> float:
    """Bytes a second at which a large array is read, by torch and with as many threads as it has now."""
    count = array_bytes // 4
    if device.type == "cpu" and sys.platform == "linux":
        array = large_pages(count, torch.float32).fill_(1.0)  # as weights lie
    else:
        array = torch.ones(count, dtype=torch.float32, device=device)
    return array_bytes / fastest(array.sum, device, READS)


def fastest(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    function()
    return min(timed_call(function, device) for _ in range(calls))


def timed_call(function: Callable[[], Any], device: torch.device) -> float:
    began = now(device)
    function()
    return now(device) - began


def weight_bytes(network: Network) -> tuple[int, int]:
    """Bytes of all the trunk's weights, and of those that one step reads; by its config, so packed ones too.

    A step looks up one row of the embedding, but reads all of it where the output head is the same matrix.
    Compiled weights may take half of the bytes that their numbers have; a tied embedding is then held apart.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(network.trunk.config)
    size = torch.empty((), dtype=network.trunk.dtype).element_size()
    every = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    halved = [one for one in stacks(network.trunk) if one.weight.element_size() < size]
    saved = sum((size - one.weight.element_size()) * one.weight.numel() for one in halved)
    read = size * (every - (0 if tied else embedding.numel())) - saved
    apart = tied and any(one.outputs == len(embedding) for one in halved)
    return size * every - saved + (size * embedding.numel() if apart else 0), read


def cache_bytes(network: Network) -> int:
    """Bytes of keys and values by token of text.

    Two layers, two key-value heads of eight numbers, float32: 2 * 2 * 2 * 8 * 4 = 256 bytes.
    """
    config = network.trunk.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = torch.empty((), dtype=network.trunk.dtype).element_size()
    return 2 * network.trunk.num_layers * config.num_key_value_heads * head * size


def peak_bytes(device: torch.device) -> dict[str, int | None]:
    """The most memory that this process has held so far, of the machine and of the GPU."""
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "gpu": on_gpu}


def roofline(network: Network) -> dict[str, Any]:
    """What the weights alone allow, as plain data: tokens a second of plain decoding at most."""
    every, read = weight_bytes(network)
    speed = bandwidth(network.trunk.device)
    return {
        "weight_bytes": every,
        "weight_bytes_read": read,
        "cache_bytes_per_token": cache_bytes(network),
        "bandwidth": speed,
        "tokens_per_second": speed / read,
    }


def wall_clock() -> str:
    """The date and time, UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())
