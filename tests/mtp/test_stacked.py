"""A matrix takes the fewest bytes that lose nothing, and says the same in any of them."""

import doctest
import shutil

import pytest
import torch
from architectures import rounded
from tiny import tiny_network
from torch import nn

import mtp.stacked
from decoding.roofline import weight_bytes
from mtp.compiled_linear import MOST_TOKENS, CompiledLinear
from mtp.kernel import BFLOATS, BYTE_TILES, BYTES, FLOAT_TILES, FLOATS, TILES, library, matrix_unit
from mtp.stacked import Quantized, Stacked, lent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
COUNTS = (1, 2, 5, 6, 8, 10, 11, 15, 16, 17, 21, 32, 40, MOST_TOKENS)
MANY = 1100  # the matrix unit takes at most 512 at once


def whole(linear):
    """Its weights need all four bytes."""
    return linear


def linear_of(outputs, inputs, bias=False, change=rounded):
    torch.manual_seed(0)
    return change(nn.Linear(inputs, outputs, bias=bias))


def test_the_documented_examples_hold():
    assert doctest.testmod(mtp.stacked).failed == 0


@pytest.mark.parametrize(
    ("outputs", "inputs", "kinds"),
    [(48, 64, {TILES, BFLOATS}), (16, 32, {TILES, BFLOATS}), (40, 64, {BFLOATS}), (48, 48, {BFLOATS})],
)
def test_bfloat16_numbers_take_two_bytes_in_tiles_where_these_fit(outputs, inputs, kinds):
    stacked = Stacked([linear_of(outputs, inputs)])
    assert stacked.kind in kinds
    assert (stacked.kind == TILES) == (TILES in kinds and matrix_unit())
    assert stacked.weight.element_size() == 2


@pytest.mark.parametrize(
    ("outputs", "inputs", "kind"), [(48, 64, FLOAT_TILES), (40, 64, FLOATS), (48, 72, FLOATS)]
)
def test_a_single_weight_that_needs_more_keeps_all_of_them_whole(outputs, inputs, kind):
    linear = linear_of(outputs, inputs)
    with torch.no_grad():
        linear.weight[7, 9] = 1 + 2**-8
    weight = linear.weight.detach().clone()
    stacked = Stacked([linear])
    assert stacked.kind == kind
    assert torch.equal(stacked.rows(), weight)


def test_floats_that_somebody_else_reads_stay_rows_and_are_not_held_twice():
    linear = linear_of(48, 64, change=whole)
    stacked = Stacked([linear], {id(linear.weight)})
    assert stacked.kind == FLOATS
    assert linear.weight.data_ptr() == stacked.weight.data_ptr()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("change", [rounded, whole])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (304, 576), (37, 41), (3, 96), (64, 33)])
@torch.no_grad()
def test_every_token_gets_its_product_and_the_same_bits_beside_any_others(outputs, inputs, change, bias):
    linear = linear_of(outputs, inputs, bias, change)
    x = torch.randn(MOST_TOKENS, inputs) * torch.logspace(-6, 6, MOST_TOKENS)[:, None]
    weight, shift = linear.weight.double(), linear.bias.double() if bias else torch.zeros(outputs)
    exact, size = x.double() @ weight.T + shift, x.double().abs() @ weight.abs().T + shift.abs()
    compiled = CompiledLinear(linear)
    all_of_them = compiled(x)
    assert ((all_of_them - exact).abs() < 2e-6 * size).all()
    for count in COUNTS:
        assert torch.equal(compiled(x[:count]), all_of_them[:count])


@torch.no_grad()
def test_numbers_that_no_bfloat16_holds_are_multiplied_whole():
    """Each of a float's three parts counts: 1 + 2^-9 + 2^-20 against a weight that cancels the first."""
    linear = nn.Linear(64, 16, bias=False)
    linear.weight.zero_()
    linear.weight[:, 0], linear.weight[:, 1] = 1.0, -1.0
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = 1 + 2**-9 + 2**-20, 1.0
    assert torch.equal(CompiledLinear(linear)(x), torch.full((1, 16), 2**-9 + 2**-20))


def product(matrix, x):
    y = torch.empty(len(x), matrix.outputs)
    library().product(matrix, len(x), x.data_ptr(), y.data_ptr())
    return y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("parts", "inputs", "tiles"),
    [([48], 64, True), ([32, 16], 576, True), ([40, 8], 64, False), ([48], 96, False), ([3], 33, False)],
)
def test_quantized_weights_give_every_token_its_product_beside_any_others(parts, inputs, tiles, bias):
    """Nothing but the weights is rounded, however large or small a token is; one is zero."""
    torch.manual_seed(0)
    weight, shift = torch.randn(sum(parts), inputs), torch.randn(sum(parts)) if bias else None
    quantized = Quantized(weight.split(parts), shift)
    assert quantized.kind == (BYTE_TILES if tiles and matrix_unit() else BYTES)
    scale = quantized.scale.double()[:, None]
    whole = (weight.double() / scale).round() * scale
    x = torch.randn(MOST_TOKENS, inputs) * torch.logspace(-6, 6, MOST_TOKENS)[:, None]
    x[5] = 0
    more = shift.double() if bias else torch.zeros(sum(parts))
    exact, size = x.double() @ whole.T + more, x.double().abs() @ whole.T.abs() + more.abs()
    all_of_them = product(quantized.matrix(), x)
    assert ((all_of_them - exact).abs() <= 2e-6 * size).all()
    for count in COUNTS:
        assert torch.equal(product(quantized.matrix(), x[:count]), all_of_them[:count])


@torch.no_grad()
def test_tokens_that_go_through_in_several_passes_get_the_same_bits():
    linear, x = linear_of(48, 64, bias=True), torch.randn(MANY, 64)
    floats = linear_of(48, 64, bias=True, change=whole)
    for one in (Quantized([linear.weight], linear.bias), Stacked([linear]), Stacked([floats])):
        pieces = [product(one.matrix(), piece) for piece in x.split(100)]
        assert torch.equal(product(one.matrix(), x), torch.cat(pieces))


def test_however_many_threads_share_a_product_its_bits_are_the_same():
    """Also where some of them get nothing: 40 outputs are three shares."""
    threads, x = torch.get_num_threads(), torch.randn(5, 64)
    weights = [torch.randn(40, 64), torch.randn(48, 64), torch.randn(48, 64).bfloat16().float()]
    linears = [nn.Linear(64, len(weight), bias=False) for weight in weights]
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight.data = weight
    matrices = [Stacked([linear]) for linear in linears] + [Quantized([weight], None) for weight in weights]
    try:
        found = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append([product(one.matrix(), x) for one in matrices])
    finally:
        torch.set_num_threads(threads)
    for some in found:
        assert all(torch.equal(one, first) for one, first in zip(some, found[0], strict=True))


def test_linears_lose_weights_that_are_kept_elsewhere_and_are_lent_them():
    linears = [linear_of(48, 64), linear_of(16, 64)]
    weights = [linear.weight.detach().clone() for linear in linears]
    stacked = Stacked(linears)
    assert all(linear.weight.numel() == 0 for linear in linears)
    with lent([stacked]):
        assert all(torch.equal(one.weight, weight) for one, weight in zip(linears, weights, strict=True))
    assert all(linear.weight.numel() == 0 for linear in linears)
    assert torch.equal(stacked.rows(), torch.cat(weights))


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_step_reads_is_halved_and_a_tied_embedding_held_apart(tied):
    network = rounded(tiny_network(tie_word_embeddings=tied))
    every, read = weight_bytes(network)
    trunk = network.trunk
    matrices = sum(part.weight.numel() for part in trunk.model.modules() if isinstance(part, nn.Linear))
    embedding = trunk.model.get_input_embeddings().weight.numel()
    network.compile_kernel()
    assert weight_bytes(network) == (every - 2 * matrices + 4 * embedding * tied, read - 2 * matrices)


def test_a_process_that_may_not_use_the_matrix_unit_gets_rows(monkeypatch):
    monkeypatch.setattr(mtp.stacked, "matrix_unit", lambda: False)
    linear = linear_of(48, 64)
    weight = linear.weight.detach().clone()
    stacked = Stacked([linear])
    assert stacked.kind == BFLOATS
    assert torch.equal(stacked.rows(), weight)
    x = torch.randn(9, 64)
    torch.testing.assert_close(product(stacked.matrix(), x), x @ weight.T)
    assert Quantized([weight], None).kind == BYTES
