"""The machine that decodes: its name, and whether others use it."""

import os
import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def processor(device: torch.device) -> str:
    """The name of the processor, of the CPU or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def busy(threads: int) -> str | None:
    """A warning when the load of the last minute is clearly more than our own threads'."""
    load = os.getloadavg()[0]
    if load <= 1.5 * threads:
        return None
    return f"the load is {load:.1f}, and only {threads} of it is our own: the times are off"
