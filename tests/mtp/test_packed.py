"""Packing changes the layout of weights, never what a network says, and can be undone bit for bit."""

import copy

import pytest
import torch
from tiny import tiny_network
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decoding import Sampling, generate
from mtp import Network, UserError, packed
from mtp.packed import PackedLinear, Product, RMSNorm, why_not

PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]


@pytest.fixture(params=[False, True], autouse=True)
def fast_mkl(request, monkeypatch):
    """On both kinds of processors."""
    monkeypatch.setattr(packed, "mkl_is_fast", lambda: request.param)
    return request.param


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 3), (7, 1), (7, 3)])
@torch.no_grad()
def test_a_product_is_that_of_all_its_linears_side_by_side(bias, rows, width):
    linears = [nn.Linear(24, size, bias=bias) for size in (8, 16, 5)]
    x = torch.randn(rows, width, 24)
    expected = torch.cat([linear(x) for linear in linears], dim=-1)
    product, other = Product(linears), torch.randn(rows, width, 29)
    torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product.plus(x, other), expected + other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@torch.no_grad()
def test_a_product_takes_the_norm_before_it_along(bias, width):
    """Also of small numbers, in which epsilon counts."""
    norm = LlamaRMSNorm(24, eps=1e-2)
    norm.weight.copy_(torch.randn(24))
    linear = nn.Linear(24, 8, bias=bias)
    x = 0.1 * torch.randn(1, width, 24)
    expected = linear(norm(x))
    product = Product([linear], norm=RMSNorm(norm))
    torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=1e-5)
    product.restore()
    torch.testing.assert_close(linear(norm(x)), expected, atol=0, rtol=0)


def test_a_product_holds_the_only_copy_until_it_is_restored():
    linear, kept = nn.Linear(8, 8), nn.Linear(8, 8)
    before, identity = linear.weight.detach().clone(), id(linear.weight)
    product = Product([linear, kept], shared={id(kept.weight)})
    assert linear.weight.numel() == 0
    assert kept.weight.numel() == 64
    product.restore()
    assert torch.equal(linear.weight, before)
    assert id(linear.weight) == identity


def test_unpacking_gives_every_weight_back_bit_for_bit():
    network = tiny_network(tie_word_embeddings=True)
    modules, state = dict(network.named_modules()), copy.deepcopy(network.state_dict())
    assert network.pack() is None
    assert network.form == "packed"
    network.unpack()
    assert network.form == "plain"
    assert dict(network.named_modules()) == modules
    assert network.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert network.trunk.model.lm_head.weight is network.trunk.model.model.embed_tokens.weight


def test_packing_twice_is_packing_once():
    network = tiny_network()
    assert network.pack() is None
    assert network.pack() is None
    kinds = [type(module).__name__ for module in network.modules()]
    assert "Linear" not in kinds
    network.unpack()


def test_a_tied_embedding_keeps_its_rows():
    network = tiny_network(tie_word_embeddings=True)
    expected = network.trunk.embed(torch.tensor([[3]]))
    network.pack()
    assert isinstance(network.trunk.model.lm_head, PackedLinear)
    assert torch.equal(network.trunk.embed(torch.tensor([[3]])), expected)


@pytest.mark.parametrize("drafter", ["none", "sequential", "parallel", "early_exit", "medusa", "eagle"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_packed_network_decodes_what_it_did_before(drafter, temperature):
    network = tiny_network()
    options = {"drafter": drafter, "sampling": Sampling(temperature=temperature), "max_new_tokens": 30}
    before = [out.token_ids for out in generate(network, PROMPTS, **options)]
    network.pack()
    assert [out.token_ids for out in generate(network, PROMPTS, **options)] == before


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [("cuda", torch.float32, "on cuda"), ("cpu", torch.bfloat16, "are bfloat16")],
)
def test_where_it_cannot_be_the_reason_is_told(device, dtype, words):
    reason = why_not(torch.device(device), dtype)
    assert reason is not None
    assert words in reason


def test_a_network_in_another_dtype_is_left_as_it_is():
    network = tiny_network().to(torch.bfloat16)
    assert "float32 only" in (network.pack() or "")
    assert network.form == "plain"


def test_a_packed_network_refuses_to_be_saved_or_cast_in_one_sentence(tmp_path):
    network = tiny_network()
    network.pack()
    for save in (
        network.state_dict,
        network.trunk.model.state_dict,
        network.double,
        lambda: network.save_pretrained(tmp_path / "n"),
    ):
        with pytest.raises(UserError, match="call unpack\\(\\) before it is saved, moved or cast"):
            save()
    assert not (tmp_path / "n").exists()
    network.unpack()
    network.save_pretrained(tmp_path / "n")
    assert Network.from_pretrained(tmp_path / "n").trunk.num_layers == network.trunk.num_layers


@torch.no_grad()
def test_a_reduced_vocabulary_reads_its_rows_alone():
    linear, ids, x = nn.Linear(8, 20), torch.tensor([3, 7, 19]), torch.randn(2, 8)
    expected = linear(x)[:, ids]
    small = PackedLinear(linear)
    for _ in range(2):
        torch.testing.assert_close(small.some(x, ids), expected)
    assert len(small.reduced) == 1
