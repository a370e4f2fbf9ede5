"""Coupled sampling: one Gumbel noise for draft and target, a function of (row seed, position, token).

A token is argmax(log p + G) whoever draws it, so for one seed the text is the same whatever drafts it,
however far, and in whatever batch. Shapes: B rows, V vocabulary.
"""

from torch import Tensor

from decoding import noise
from decoding.sampling import best


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] (float64) for the token at `positions` [B] of rows with `seeds` [B]."""
    u = noise.uniforms(seeds, positions, noise.COUPLE, vocab_size)
    return -(-u.log()).log()


def coupled_choice(law: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """argmax(log law + G) [B] of a law [B, V]: the token that the noise makes of it."""
    return best(law.double().log() + gumbel(seeds, positions, law.shape[-1]))
