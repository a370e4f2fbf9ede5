"""Random numbers as a function of (row seed, step, role, node), so that no two draws share one.

A row's numbers depend on nothing but its own seed and place, whatever rows decode beside it. The generator
hashes the key with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

import torch
from torch import Tensor

# Roles: drawing a draft token, testing a node, drawing the next token, the noise of coupled sampling.
DRAFT, ACCEPT, NEXT, COUPLE = 1, 2, 3, 4
SEEDS = 2**62  # seeds lie between minus and plus this
WORD = 2**64 - 1
FEW = 64  # so many numbers are made faster as Python's integers than by two dozen small tensor operations
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: SplitMix64's increment


def uniforms(seeds: Tensor, step: int | Tensor, role: int, count: int) -> Tensor:
    """One float64 in [0, 1) for each row and each node 0 ... count-1: seeds [B] int64 -> [B, count].

    step is one number for all rows or [B] int64.
    """
    if seeds.is_cpu and not isinstance(step, Tensor) and len(seeds) * count <= FEW:
        lines = [uniform_line(seed, step, role, count) for seed in seeds.tolist()]
        return torch.tensor(lines, dtype=torch.float64).view(len(seeds), count)
    nodes = torch.arange(1, count + 1, device=seeds.device) * signed(GOLDEN)
    turn = (step + 1) * signed(GOLDEN) if isinstance(step, Tensor) else signed(GOLDEN * (step + 1))
    row = mix(mix(seeds + signed(GOLDEN * role)) + turn)
    bits = mix(row[:, None] + nodes)
    return shift_right(bits, 11).double() * 2.0**-53


def uniform_line(seed: int, step: int, role: int, count: int) -> list[float]:
    """`uniforms` of one row, number by number: the same bits."""
    row = mix_word(mix_word(seed + GOLDEN * role) + GOLDEN * (step + 1))
    return [(mix_word(row + GOLDEN * node) >> 11) * 2.0**-53 for node in range(1, count + 1)]


def mix_word(x: int) -> int:
    """`mix` of one unsigned number."""
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors; products wrap around as they do on unsigned numbers."""
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """The int64 with the same bits as x modulo 2**64.

    >>> signed(2**64 - 1)
    -1
    """
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x
