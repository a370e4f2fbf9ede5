"""How often the processor waits for the device while decoding: each wait costs a GPU its head start."""

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from decoding.contest import WARM_UP_TOKENS, Build, Ours
from mtp import Network

# Calls that return only when the device has done what it was told, by the profiler's names. What is counted
# on a CPU is what item(), int(), bool() and the like come down to; on a GPU that ends in a wait, and so does
# a copy to the processor, which costs nothing on a CPU.
ON_CPU = ("aten::_local_scalar_dense",)
ON_GPU = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def waits(
    network: Network, build: Build, prompt: list[int], max_new_tokens: int, **options: Any
) -> dict[str, Any]:
    """Waits by step in steady decoding: of a whole run those of a shorter one are taken away.

    So neither the prompt's pass nor what the profiler does itself is counted. options are generate's.
    """
    contender = Ours("", network, build, **options)
    contender(prompt, WARM_UP_TOKENS)  # with automatic length costs are measured first
    short, few = watched(contender, prompt, max_new_tokens // 2)
    long, many = watched(contender, prompt, max_new_tokens)
    calls = {name: count - short[name] for name, count in long.items()}
    return {"calls": calls, "steps": many - few, "per_step": sum(calls.values()) / max(1, many - few)}


def watched(contender: Ours, prompt: list[int], max_new_tokens: int) -> tuple[Counter[str], int]:
    """Waiting calls of one run by name, and its steps."""
    on_gpu = contender.network.trunk.device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        done = contender(prompt, max_new_tokens)
    names = ON_GPU if on_gpu else ON_CPU
    counts = Counter({event.key: event.count for event in found.key_averages() if event.key in names})
    assert done.completion is not None
    return counts, done.completion.acceptance.steps
