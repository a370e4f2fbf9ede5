"""What a step costs in plain decoding's steps, by the weights it reads: where decoding is bound by memory.

Scoring several tokens then costs what scoring one does. A step that drafts n tokens costs 1 + n·c, where c is
the draft's weights by the trunk's. That holds for an early exit too: n+1 passes below the exit, one above.
Nothing is timed, so it is the same everywhere; it also tells what a deeper trunk would change.
"""

import dataclasses
from dataclasses import dataclass

from ablation.flops import Work, layer_weights, output_weights
from mtp import Network

DEEP = 32  # layers of the trunk that predictions are also made for


@dataclass(frozen=True, slots=True)
class Parts:
    """A trunk and a draft in units of one trunk layer's weights, and shares of the output matrix."""

    layers: int  # of the trunk
    output: float  # weights of the output matrix by those of the whole trunk
    draft_layers: float  # run for one drafted token
    draft_output: float  # of the output matrix, read for one drafted token, or
    together: bool = False  # once for all of them (parallel heads)
    shared: bool = False  # whether the draft's layers are the trunk's own (an early exit)

    def at(self, layers: int) -> "Parts":
        """The same head on a trunk of so many layers; an exit stays at its share of them.

        The output matrix keeps its share of the trunk.
        """
        draft_layers = self.draft_layers * layers / self.layers if self.shared else self.draft_layers
        return dataclasses.replace(self, layers=layers, draft_layers=draft_layers)

    def price(self, drafted: int) -> float:
        """Of a step that drafts so many tokens.

        A head of one layer on a trunk of four, no output matrix; an output matrix as large as the layers:

        >>> Parts(4, 0.0, 1.0, 1.0).price(2), Parts(4, 0.5, 0.0, 1.0).price(2)
        (1.5, 2.0)
        """
        outputs = min(drafted, 1) if self.together else drafted
        layers = drafted * (1 - self.output) * self.draft_layers / self.layers
        return 1 + layers + outputs * self.output * self.draft_output

    def prices(self, longest: int) -> list[float]:
        return [self.price(n) for n in range(longest + 1)]

    def draft_cost(self, drafted: int) -> float:
        """c: of one drafted token among so many."""
        return (self.price(drafted) - 1) / drafted if drafted else 0.0


def parts(network: Network, name: str, work: Work) -> Parts:
    """Of a drafter of this name that does this work for one token."""
    layer, output = layer_weights(network), output_weights(network)
    return Parts(
        layers=network.trunk.num_layers,
        output=output / (layer * network.trunk.num_layers + output),
        draft_layers=work.layers / layer,
        draft_output=work.output / output,
        together=name == "parallel",
        shared=name == "early_exit",
    )
