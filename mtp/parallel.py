"""Meta's parallel heads (arXiv 2404.19737): one layer each, side by side on one state of the trunk.

Shapes: B rows, T tokens, H hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mtp.block import Block, initialise
from mtp.draft_vocab import DraftVocab, add_draft_ids, read_out, stored_option
from mtp.drafting import Parts
from mtp.errors import UserError, check_whole
from mtp.readout import Readout
from mtp.trunk import Keys, Trunk

FORMS = ("parallel", "causal", "linear")


class Parallel(nn.Module):
    """D blocks that share the trunk's final norm and output matrix; head k at position i predicts token
    i+1+k.

    The paper's shared trunk ends before the last layer, and that layer is its head 1 (the next token). So the
    blocks read the state after layer L-1 by default (`tap`); they are the paper's heads 2, 3, ...

    `form` is one of the paper's variants (appendix B): `parallel`; `linear`, where a head is a matrix and no
    layer; `causal`, where head k reads head k-1's output and the first one head 1's, which is the trunk's
    final state (`tap` L, here after the norm).
    """

    kind = "parallel"
    draft_ids: Tensor | None

    def __init__(
        self,
        trunk: Trunk,
        depth: int = 4,
        tap: int | None = None,
        form: str = "parallel",
        draft_vocab: DraftVocab = None,
    ):
        super().__init__()
        if form not in FORMS:
            raise UserError(f"parallel head: form={form!r} is not one of {', '.join(FORMS)}")
        tap = trunk.num_layers - (form != "causal") if tap is None else tap
        check_whole("parallel head: depth", depth, 1)
        check_whole("parallel head: tap", tap, 0, trunk.num_layers)
        self.options = {"depth": depth, "tap": tap, "form": form, "draft_vocab": stored_option(draft_vocab)}
        self.taps = (tap,)
        self.depth, self.chained = depth, form == "causal"
        new = (lambda index: Matrix(trunk)) if form == "linear" else (lambda index: Block(trunk, index))
        self.blocks = nn.ModuleList(new(index) for index in range(depth))
        add_draft_ids(self, trunk, draft_vocab, self.kind)

    def readouts(
        self, trunk: Trunk, tokens: Tensor, states: dict[int, Tensor], *, mask: Tensor | None = None
    ) -> Iterator[Readout]:
        """Every head at every position of tokens [B, T]; the heads see no token but through the trunk's
        state."""
        state = hidden = states[self.taps[0]]
        rotary = trunk.rotary(state, torch.arange(tokens.shape[1], device=tokens.device)[None])
        for k in range(1, self.depth + 1):
            hidden = self.run(k, self.source(state, hidden), rotary, mask)
            yield Readout(f"depth{k}", k, trunk.norm(hidden), ids=self.draft_ids)

    def source(self, state: Tensor, hidden: Tensor) -> Tensor:
        """What the next head reads: the trunk's state, or the output of the head before it (`causal`)."""
        return hidden if self.chained else state

    def run(
        self,
        depth: int,
        source: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Keys | None = None,
    ) -> Tensor:
        """Head k = 1, 2, ... on what it reads [B, T, H]: [B, T, H], before the norm."""
        return self.blocks[depth - 1](source, rotary, mask, cache)

    def parts(self, trunk: Trunk, depth: int) -> Parts:
        block = self.blocks[depth - 1]
        return Parts(block.layer if isinstance(block, Block) else block, trunk.model.model.norm)

    def logits(self, trunk: Trunk, depth: int, hidden: Tensor) -> Tensor:
        """What a head's output [..., H] says: [..., V], -inf where it may not draft; the same for all
        depths."""
        return read_out(trunk, trunk.norm(hidden), self.draft_ids)


class Matrix(nn.Module):
    """A head that is one matrix: it looks at its own position only, so it keeps no keys."""

    def __init__(self, trunk: Trunk):
        super().__init__()
        self.linear = nn.Linear(trunk.hidden_size, trunk.hidden_size, bias=False)
        initialise(self.linear, trunk)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Keys | None = None,
    ) -> Tensor:
        return self.linear(hidden)


def build(
    trunk: Trunk,
    depth: int = 4,
    tap: int | None = None,
    form: str = "parallel",
    draft_vocab: DraftVocab = None,
) -> Parallel:
    return Parallel(trunk, depth, tap, form, draft_vocab)
