"""The kernel says what an architecture's own modules say, the same bits however much is scored with it."""

import copy
import functools
import shutil

import architectures
import pytest
import torch
from architectures import LAYERS, gives_all_back, quantizable, rounded, trunk_of
from tiny import tiny_network
from torch import nn

from decoding import Sampling, generate
from decoding.cache import KVCache
from mtp import Network, UserError, kernel
from mtp.compiled import stacks
from mtp.compiled_linear import MOST_TOKENS, CompiledLinear
from mtp.kernel import BFLOATS, TILES, matrix_unit, why_not
from mtp.trunk import ARCHITECTURES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
TOKENS = torch.tensor([[1, 5, 2, 2, 9, 7, 30, 4], [3, 3, 3, 1, 8, 63, 0, 6]])
PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]
CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # both are this far from the same sums in float64


def built(trunk):
    """A copy of the trunk, compiled."""
    other = copy.deepcopy(trunk)
    assert Network(other).compile_kernel() is None
    return other


@pytest.fixture(
    scope="module",
    params=[(one, change) for one in ARCHITECTURES for change in (lambda trunk: trunk, rounded)],
    ids=[f"{one}-{stored}" for one in ARCHITECTURES for stored in ("float32", "bfloat16")],
)
def pair(request):
    """A trunk in float32, of weights that were stored as float32 or bfloat16, and the same compiled."""
    architecture, change = request.param
    ours = change(trunk_of(architecture))
    return ours, built(ours)


agree = functools.partial(architectures.agree, **CLOSE)


@torch.no_grad()
def test_a_text_without_a_mask_is_causal(pair):
    agree(pair, TOKENS)
    agree(pair, TOKENS[:, :1])


@torch.no_grad()
def test_any_mask_and_any_positions_are_obeyed(pair):
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 8, 8) < 0.5
    mask |= torch.eye(8, dtype=torch.bool)
    agree(pair, TOKENS, mask=mask)
    agree(pair, TOKENS, mask=mask[:1], positions=torch.randint(0, 60, (2, 8)))


@torch.no_grad()
def test_a_text_beyond_the_kernels_size_goes_through_torch(pair):
    agree(pair, TOKENS.repeat(1, MOST_TOKENS // 16 + 1))


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_a_long_text_in_tiles_goes_through_the_kernel(masked):
    """By more than the queries that are attended together, with and without something before it."""
    ours = rounded(trunk_of("llama", intermediate_size=64, max_position_embeddings=1024))
    trunks, said = (ours, built(ours)), []
    assert trunks[1].layers[0].unbounded == matrix_unit()
    tokens = torch.randint(0, 64, (2, 300), generator=torch.manual_seed(0))
    for trunk in trunks:
        cache = KVCache(2, torch.device("cpu"))
        for width in (5, 295):
            window = cache.open(width, causal=not masked)
            part = tokens[:, :width] if width == 5 else tokens[:, 5:]
            out = trunk(part, positions=window.positions, mask=window.mask, cache=cache)
            cache.commit(torch.ones(2, width, dtype=torch.bool))
        said.append(out.logits)
    torch.testing.assert_close(*said, **CLOSE)


@torch.no_grad()
def test_positions_that_are_not_the_windows_are_obeyed(pair):
    said = []
    for trunk in pair:
        cache = KVCache(2, torch.device("cpu"))
        cache.open(8, causal=True)
        said.append(trunk(TOKENS, positions=torch.arange(5, 13)[None] * 2, cache=cache).logits)
    torch.testing.assert_close(*said, **CLOSE)


@torch.no_grad()
def test_the_first_of_the_best_tokens_comes_with_logits(pair):
    out = pair[1](TOKENS)
    assert torch.equal(out.best, out.logits.argmax(-1))
    assert pair[1](TOKENS, logits=False).best is None


@torch.no_grad()
def test_a_token_beyond_the_vocabulary_is_told_before_anything_is_read(pair):
    for wrong in (-1, 64):
        with pytest.raises(IndexError, match=f"token {wrong} is not one of 64"):
            pair[1](torch.tensor([[1, wrong]]))


@pytest.mark.parametrize("start", range(LAYERS + 1))
@torch.no_grad()
def test_it_can_be_entered_after_any_layer(pair, start):
    torch.manual_seed(0)
    agree(pair, TOKENS, start=start, states=torch.randn(2, 8, 32))


@pytest.mark.parametrize("parents", [None, [[0, 0, 1], [0, -1, -1]]])
@torch.no_grad()
def test_rows_of_different_lengths_share_a_cache(pair, parents):
    results = []
    for trunk in pair:
        cache = KVCache(2, torch.device("cpu"))
        window = cache.open(8)
        trunk(TOKENS, positions=window.positions, mask=window.mask, cache=cache)
        cache.commit(torch.arange(8) < torch.tensor([[8], [3]]))
        window = cache.open(4, parents=None if parents is None else torch.tensor(parents))
        out = trunk(TOKENS[:, :4], positions=window.positions, mask=window.mask, cache=cache)
        results.append(out.logits)
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@pytest.mark.parametrize("head_dim", [6, 16, 22, 32, 64, 90])
@torch.no_grad()
def test_biases_are_kept_and_odd_sizes_fit(head_dim):
    ours = trunk_of(
        "llama", attention_bias=True, mlp_bias=True, hidden_size=27, intermediate_size=37,
        head_dim=head_dim, num_attention_heads=3, num_key_value_heads=1,
    )  # fmt: skip
    agree((ours, built(ours)), TOKENS)


@torch.no_grad()
def test_what_a_token_gets_does_not_depend_by_a_bit_on_how_many_are_scored_with_it(pair):
    trunk = pair[1]
    together = trunk(TOKENS)
    for count in (1, 2, 3, 5, 7):
        assert torch.equal(trunk(TOKENS[:1, :count]).logits, together.logits[:1, :count])
    cache = KVCache(1, torch.device("cpu"))
    for place in range(8):
        window = cache.open(1)
        out = trunk(TOKENS[:1, place : place + 1], positions=window.positions, cache=cache)
        assert torch.equal(out.logits[0, 0], together.logits[0, place])
        cache.commit(torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize("drafter", ["none", "sequential", "parallel", "eagle", "early_exit"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_compiled_network_decodes_what_it_did_before(drafter, temperature):
    network = quantizable(tiny_network())  # as compiled heads draft with quantized weights
    kinds = {one.kind for one in stacks(built(network.trunk))}
    assert kinds
    assert kinds <= {TILES, BFLOATS}
    options = {"drafter": drafter, "sampling": Sampling(temperature=temperature), "max_new_tokens": 30}
    before = [out.token_ids for out in generate(network, PROMPTS, **options)]
    assert network.compile_kernel() is None
    assert network.form == "compiled"
    assert [out.token_ids for out in generate(network, PROMPTS, **options)] == before


@pytest.mark.parametrize("count", [1, 3, MOST_TOKENS, MOST_TOKENS + 1])
@torch.no_grad()
def test_a_linear_is_itself(count):
    linear, x = nn.Linear(19, 21), torch.randn(count, 19)
    torch.testing.assert_close(CompiledLinear(linear)(x), linear(x), **CLOSE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", [lambda network: network, rounded], ids=["float32", "bfloat16"])
def test_unpacking_gives_every_module_and_weight_back(change, tied):
    gives_all_back(change(tiny_network(tie_word_embeddings=tied)), Network.compile_kernel, "compiled")


def test_one_form_takes_the_place_of_the_other():
    network = tiny_network()
    for change, form in (
        (network.pack, "packed"),
        (network.compile_kernel, "compiled"),
        (network.pack, "packed"),
    ):
        assert change() is None
        assert network.form == form


@pytest.mark.parametrize(
    ("device", "dtype", "act", "words"),
    [
        ("cuda", torch.float32, "silu", "float32 on cuda"),
        ("cpu", torch.bfloat16, "silu", "bfloat16 on cpu"),
        ("cpu", torch.float32, "gelu", "has gelu"),
    ],
)
def test_where_it_cannot_be_the_reason_is_told(device, dtype, act, words):
    config = trunk_of("llama", hidden_act=act).config
    reason = why_not(torch.device(device), dtype, config)
    assert reason is not None
    assert words in reason


def test_without_a_compiler_the_reason_is_told(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in (tiny_network().compile_kernel() or "")


def test_a_compiler_that_fails_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel, "FLAGS", ("--no-such-option",))
    with pytest.raises(UserError, match="cannot build the kernel"):
        kernel.build(tmp_path / "kernel.so")
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_built_or_kept_the_network_stays_as_it_is(monkeypatch, tmp_path):
    network = tiny_network()
    monkeypatch.setattr(kernel, "library", kernel.library.__wrapped__)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "the kernel cannot be kept in" in (network.compile_kernel() or "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "FLAGS", ("--no-such-option",))
    assert "cannot build the kernel" in (network.compile_kernel() or "")
    assert network.form == "plain"


def test_a_kernel_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel.library.__wrapped__()
    (kept,) = (tmp_path / "mtp").iterdir()
    monkeypatch.setattr(kernel, "build", None)
    kernel.library.__wrapped__()
    assert kept.suffix == ".so"
