"""Builds the C++ kernels for this machine, once, and says how they are called.

The result lies in the user's cache folder, under a name made of all that it depends on.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from mtp.errors import UserError

SOURCE = Path(__file__).with_name("draft.cpp")  # includes the others
SOURCES = (SOURCE, *(SOURCE.with_name(name) for name in ("kernel.cpp", "tiles.cpp", "float_tiles.cpp")))
# No library is linked: OpenMP's functions are found in the runtime that torch has loaded, and threads shared.
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti",
    "-fno-math-errno", "-nodefaultlibs",
)  # fmt: skip


FLOATS, BYTES, BFLOATS, TILES, BYTE_TILES, FLOAT_TILES = range(6)  # how weights lie: kernel.cpp's Kind


class Matrix(Structure):
    """kernel.cpp's struct of that name."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "kind")),
    ]


class Layer(Structure):
    """kernel.cpp's struct of that name."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("first_norm", "second_norm", "query_norm", "key_norm")),
        *((name, c_int64) for name in ("hidden", "inner", "queries", "keys", "size")),
        ("epsilon", c_float),
        ("scale", c_float),
        ("next", c_void_p),
    ]


class Run(Structure):
    """kernel.cpp's struct of that name."""

    _fields_ = [
        *((name, c_int64) for name in ("layers", "texts", "width", "slots")),
        *((name, c_void_p) for name in ("x", "cosines", "sines")),
        ("angles", c_int64),
        ("stored", POINTER(c_void_p)),
        *((name, c_int64) for name in ("text_step", "head_step")),
        ("places", c_void_p),
        ("first", c_int64),
        ("mask", c_void_p),
        ("mask_step", c_int64),
        ("ends", POINTER(c_int64)),
        *((name, c_void_p) for name in ("scratch", "y")),
    ]


class Pass(Structure):
    """kernel.cpp's struct of that name."""

    _fields_ = [
        ("run", Run),
        *((name, c_void_p) for name in ("tokens", "embedding")),
        ("vocabulary", c_int64),
        ("norm", c_void_p),
        ("epsilon", c_float),
        ("normed", c_void_p),
        ("output", Matrix),
        *((name, c_void_p) for name in ("logits", "best")),
    ]


class Output(Structure):
    """draft.cpp's struct of that name."""

    _fields_ = [("rows", Matrix), ("ids", c_void_p)]


class Stage(Structure):
    """draft.cpp's struct of that name."""

    _fields_ = [
        ("token_norm", c_void_p),
        ("state_norm", c_void_p),
        ("project", Matrix),
        ("block", Layer),
        ("norm", c_void_p),
    ]


class Depths(Structure):
    """draft.cpp's struct of that name."""

    _fields_ = [
        ("depths", c_int64),
        ("stages", POINTER(POINTER(Stage))),
        ("run", Run),
        ("chained", c_int64),
        *((name, c_void_p) for name in ("embedding", "line")),
        ("line_step", c_int64),
        ("columns", c_void_p),
        ("count", c_int64),
        ("output", Output),
        *((name, c_void_p) for name in ("read", "logits", "picks")),
    ]


class Exit(Structure):
    """draft.cpp's struct of that name."""

    _fields_ = [
        ("nodes", c_int64),
        ("layers", POINTER(POINTER(Layer))),
        *((name, c_int64) for name in ("below", "all")),
        ("run", Run),
        ("grows", c_int64),
        *((name, c_void_p) for name in ("embedding", "norm")),
        ("epsilon", c_float),
        ("output", Output),
        *((name, c_void_p) for name in ("read", "logits", "tokens")),
    ]


def why_not(device: torch.device, dtype: torch.dtype, config: Any) -> str | None:
    """Why there is no kernel for a trunk, or None where there is one."""
    if device.type != "cpu" or dtype != torch.float32:
        kind = str(dtype).removeprefix("torch.")
        return f"the kernel is for float32 on a CPU, and this network is {kind} on {device.type}"
    if config.hidden_act != "silu":
        return f"the kernel knows the activation silu only, and this network has {config.hidden_act}"
    if platform.system() != "Linux":
        return f"the kernel is for Linux, and this is {platform.system()}"
    if compiler() is None:
        return "there is no C++ compiler (g++ or what CXX names) to build the kernel with"
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel, built unless the cache folder has it; UserError where the compiler fails."""
    try:
        if not path().is_file():
            build(path())
        lib, number, pointer = ctypes.CDLL(str(path())), c_int64, c_void_p
    except OSError as error:  # the folder cannot be written to, or nothing in it be run
        why = error.strerror or error
        raise UserError(f"the kernel cannot be kept in {cache_folder()} ({why})") from None
    lib.product.argtypes = [POINTER(Matrix), number, pointer, pointer]
    lib.run_layers.argtypes = [POINTER(Layer), POINTER(Run)]
    lib.normalize.argtypes = [pointer, number, number, c_float, pointer, pointer]
    lib.score.argtypes = [POINTER(Layer), POINTER(Pass)]
    lib.score.restype = lib.matrix_unit.restype = number
    lib.draft_depths.argtypes = [POINTER(Depths)]
    lib.draft_exit.argtypes = [POINTER(Exit)]
    for function in (lib.product, lib.run_layers, lib.normalize, lib.draft_depths, lib.draft_exit):
        function.restype = None
    return lib


@functools.cache
def matrix_unit() -> bool:
    """Whether the processor multiplies tiles (Intel's AMX), and the system lets this process use that."""
    return bool(library().matrix_unit())


def path() -> Path:
    """The built kernel's file, whether it is there or not."""
    return cache_folder() / f"kernel-{build_key()}.so"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp"


def build_key() -> str:
    """Of the sources, the compiler and the processor: what the built kernel depends on."""
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, check=False).stdout
    cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    features = [line for line in cpu if line.startswith(("flags", "Features", "model name"))]
    parts = (*(source.read_bytes() for source in SOURCES), version, "\n".join((*FLAGS, *features)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build(file: Path) -> None:
    """Compile the kernels to `file`, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        built = Path(folder) / file.name
        done = subprocess.run(
            [str(compiler()), *FLAGS, str(SOURCE), "-o", str(built)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            line = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise UserError(f"{compiler()} cannot build the kernel ({line[:160]})")
        os.replace(built, file)
