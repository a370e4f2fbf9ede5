"""Coupled sampling: one Gumbel noise for draft and target, a function of (row seed, position, token).

A token is argmax(log p + G) whoever draws it, so for one seed the text is the same whatever drafts it,
however far, and in whatever batch. Shapes: B rows, V vocabulary.
"""

from torch import Tensor

from decoding import noise


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] (float64) for the token at `positions` [B] of rows with `seeds` [B]."""
    u = noise.uniforms(seeds, positions, noise.COUPLE, vocab_size)
    return -(-u.log()).log()


def coupled_law(law: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The one-hot law [B, V] at argmax(log law + G): what the noise makes of it."""
    best = (law.double().log() + gumbel(seeds, positions, law.shape[-1])).argmax(-1, keepdim=True)
    return law.new_zeros(law.shape).scatter_(-1, best, 1.0)
