"""Every variant of a head drafts exactly what its training readouts say, token by token of its own draft."""

import pytest
import torch
from tiny import tiny_trunk

from decoding import generate
from decoding.cache import KVCache
from decoding.context import StepContext
from decoding.generate import GREEDY, build_drafter
from decoding.sampling import RowSampling
from mtp import Network
from mtp.checkpoint import build_head

TEXT = [5, 3, 9, 9, 1, 2, 7, 7, 30]
VARIANTS = [
    ("sequential", {"depth": 1, "repeat": 4}),
    ("sequential", {"depth": 2, "repeat": 4, "draft_vocab": 20}),
    ("sequential", {"draft_vocab": [1, 5, 7, 9, 30, 63]}),
    ("parallel", {"form": "causal"}),
    ("parallel", {"form": "causal", "tap": 2}),
    ("parallel", {"form": "linear"}),
    ("parallel", {"draft_vocab": 20}),
    ("eagle", {"rollout": 4}),
    ("eagle", {"rollout": 3, "draft_vocab": 20}),
    ("early_exit", {"exit_layer": 3, "adapter": "norm"}),
    ("early_exit", {"exit_layer": 1, "adapter": 4}),
]


def network_with(name: str, options: dict) -> Network:
    trunk = tiny_trunk()
    head = build_head(name, trunk, **options)
    with torch.no_grad():  # as it begins, an adapter changes nothing
        for parameter in head.parameters() if name == "early_exit" else ():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    return Network(trunk, {name: head}).eval()


@torch.inference_mode()
def drafted(network: Network, name: str, count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens and laws of a greedy draft after TEXT, whose last token is the root."""
    drafter, cache, laws = build_drafter(network, name), KVCache(1, network.trunk.device), []
    drafter.reset(1, cache)
    tokens = torch.tensor([TEXT[:-1]])
    window = cache.open(tokens.shape[1])
    out = network.trunk(tokens, positions=window.positions, mask=window.mask, cache=cache, taps=drafter.taps)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    cache.commit(keep)
    drafter.extend(tokens, out.states, keep)
    sampling = RowSampling.stack([GREEDY], network.trunk.vocab_size, network.trunk.device)
    context = StepContext(sampling, torch.tensor([0]), [20], 0, count)
    raw = context.law
    context.law = lambda logits, path: laws.append(logits[0].softmax(-1)) or raw(logits, path)
    draft = drafter.propose(torch.tensor(TEXT[-1:]), count, context)
    return draft.tokens[0].tolist(), laws


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@torch.no_grad()
def test_a_draft_follows_the_laws_of_the_training_readouts(name, options):
    network = network_with(name, options)
    tokens, laws = drafted(network, name, 4)
    assert len(laws) >= 3
    head, trunk, row = network.heads[name], network.trunk, torch.tensor([TEXT + tokens])
    readouts = list(head.readouts(trunk, row, trunk(row, taps=head.taps, logits=False).states))
    for step, law in enumerate(laws):
        readout = readouts[0] if name == "early_exit" else readouts[min(step, len(readouts) - 1)]
        place = len(TEXT) - 1 + step if name == "early_exit" else len(TEXT) - 2
        if name != "early_exit" and step >= len(readouts):  # deeper than the head was trained
            break
        logits = trunk.lm_head(readout.hidden[0, place])
        if readout.ids is not None:
            outside = torch.ones(trunk.vocab_size, dtype=torch.bool)
            outside[readout.ids] = False
            logits = logits.masked_fill(outside, -torch.inf)
        torch.testing.assert_close(law, logits.softmax(-1), atol=2e-5, rtol=0)
    if ids := options.get("draft_vocab"):
        assert set(tokens) <= set(range(ids) if isinstance(ids, int) else ids)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_variant_decodes_what_plain_decoding_does(name, options, packed):
    network = network_with(name, options)
    if packed and network.pack() is not None:
        pytest.skip("weights cannot be packed here")

    def make(drafter, **more):
        return generate(network, [TEXT, TEXT[3:]], drafter=drafter, max_new_tokens=24, **more)

    for one, two in zip(make(name, num_draft_tokens=4), make("none"), strict=True):
        assert one.token_ids == two.token_ids


def test_the_default_early_exit_with_an_adapter_says_what_the_plain_exit_says():
    trunk = tiny_trunk()
    state = torch.randn(1, 3, trunk.hidden_size)
    for adapter in ("norm", 4):
        head = build_head("early_exit", trunk, adapter=adapter)
        assert torch.equal(head.exit(trunk, state), trunk.norm(state))
