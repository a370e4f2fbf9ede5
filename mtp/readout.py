"""What a head says at every position of a row whose tokens are all known (teacher forcing).

`head.readouts(trunk, tokens, states)` yields one readout after the other. Where `head.chained` is False, none
needs another, so that each can be made, used and dropped before the next; otherwise depth k is made of what
depth k-1 is made of. With mask [B, 1, T, T] (True where a position may look, as in Trunk.run) the head looks
no further than the trunk did that made the states.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Readout:
    """One prediction of one head at every position of a row.

    At position i it is about token i+1+depth; depth 0 is the trunk's own prediction. Where token i+depth lies
    beyond the row, the state is meaningless and no target exists.

    >>> Readout("depth2", 2, hidden).depth  # doctest: +SKIP
    2                                        # position 5 predicts token 8
    """

    name: str  # "depth1", "depth2", ... or "layer4" for an exit
    depth: int
    hidden: Tensor  # [B, T, H] after the norm that goes before the output matrix
    matrix: Tensor | None = None  # [V, H] the head's own output matrix; None: the trunk's
    feature: Tensor | None = None  # [B, T, H] true state that `hidden` foretells, for heads that learn it
    ids: Tensor | None = None  # [R] the tokens that the head may draft, ascending; None: all
