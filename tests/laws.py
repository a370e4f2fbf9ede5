"""The law of what is decoded, enumerated and counted; table networks whose heads are as good as is wanted."""

import itertools

import torch
from tiny import table_trunk

from decoding import Sampling, generate
from decoding.sampling import RowSampling, law
from mtp import Network
from mtp.checkpoint import build_head

RUNS = 8_000  # a law .07 off in total variation, the least that a wrong rule was found to be, is far outside
SETTINGS = Sampling(temperature=0.8, top_k=5, top_p=0.93)


@torch.no_grad()
def enumerated(network: Network, prompt: list[int], sampling: Sampling, length: int = 3) -> torch.Tensor:
    """The law of the next `length` tokens [V, V, V], from one trunk pass over every prefix."""
    size = network.trunk.vocab_size
    prefixes = list(itertools.product(range(size), repeat=length - 1))
    rows = torch.tensor([prompt + list(prefix) for prefix in prefixes])
    logits = network.trunk(rows).logits[:, len(prompt) - 1 :]
    steps = law(logits, RowSampling.stack([sampling] * len(rows), size, rows.device)).double()
    joint = steps[:, length - 1]
    for depth in range(length - 1):
        token = rows[:, len(prompt) + depth]
        joint = joint * steps[torch.arange(len(rows)), depth, token][:, None]
    return joint.reshape([size] * length)


def check_law(
    network: Network, prompt: list[int], sampling: Sampling = SETTINGS, *, runs: int = RUNS, **options
) -> float:
    """Decode `runs` times, compare the first three tokens' frequencies with enumeration; returns alpha."""
    expected = enumerated(network, prompt, sampling).flatten() * runs
    out = generate(network, [prompt] * runs, sampling=sampling, max_new_tokens=4, **options)
    size = network.trunk.vocab_size
    cells = torch.tensor([(c.token_ids[0] * size + c.token_ids[1]) * size + c.token_ids[2] for c in out])
    observed = torch.bincount(cells, minlength=len(expected)).double()
    assert observed[expected == 0].sum() == 0, "a token of probability zero was emitted"
    chi_square_agrees(observed, expected)
    tested = sum(c.acceptance.tested for c in out)
    return sum(c.acceptance.accepted for c in out) / tested if tested else 0.0


def chi_square_agrees(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's statistic, cells below 5 pooled, within 4 standard deviations of its mean."""
    large = expected >= 5
    o = torch.cat([observed[large], observed[~large].sum()[None]])
    e = torch.cat([expected[large], expected[~large].sum()[None]])
    o, e = o[e > 0], e[e > 0]
    freedom = len(e) - 1
    statistic = float(((o - e) ** 2 / e).sum())
    assert (statistic - freedom) / (2 * freedom) ** 0.5 < 4, (
        f"chi-square {statistic:.0f} at {freedom} degrees"
    )


def blended(trunk, kind: str, good: torch.nn.Module, bad: torch.nn.Module, share: float) -> Network:
    """A head whose weights lie between a good and a bad one's."""
    with torch.no_grad():
        for ours, theirs in zip(good.parameters(), bad.parameters(), strict=True):
            ours.mul_(1 - share).add_(share * theirs)
    return Network(trunk, {kind: good}).eval()


@torch.no_grad()
def table_network(kind: str, share: float) -> Network:
    """Heads that know the table: perfect at share 0, random at share 1.

    A sequential module sees the token before its target, and its law is that token's row, and so does EAGLE's
    head. A parallel or a Medusa head does not see it, so its table's rows are all alike.
    """
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(6, 6, generator=generator)
    if kind in ("parallel", "medusa"):
        table = table[:1].repeat(6, 1)
    trunk = table_trunk(table)
    torch.manual_seed(7)
    options = {} if kind == "eagle" else {"depth": 3}
    good, bad = (build_head(kind, trunk, **options) for _ in range(2))
    for parameter in bad.parameters():
        parameter.copy_(torch.randn_like(parameter))
    for name, parameter in good.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        if name.endswith("eh_proj.weight"):
            parameter.copy_(torch.cat([torch.eye(6), torch.zeros(6, 6)], dim=1))
        if name == "fc.weight":  # the state after the norm is 6 ** 0.5 times the token's unit vector
            parameter.copy_(torch.cat([6**0.5 * torch.eye(6), torch.zeros(6, 6)], dim=1))
        if name == "fc.bias":
            parameter.zero_()
    return blended(trunk, kind, good, bad, share)
