"""Laws are transformers' own, at every temperature; a draw follows its law and never leaves it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import successor_table, table_trunk
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding import Sampling, generate
from decoding import sampling as sampling_module
from decoding.sampling import RowSampling, best, draw, law
from mtp import Network, UserError

V = 40
SETTINGS = {
    "temperature": st.sampled_from([0.1, 0.5, 1.0, 1.7, 30.0]),
    "top_k": st.sampled_from([0, 1, 2, 5, V - 1, V, V + 1, 10_000]),
    "top_p": st.sampled_from([1e-9, 0.01, 0.3, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.02, 0.5]),
}
TEMPERATURES = [0, 1e-300, 1e-50, 1e-12, 1e-6, 1e-5, 1e-3]
BELOW_ONE = 1 - 2.0**-53


def law_of(logits: torch.Tensor, *samplings: Sampling) -> torch.Tensor:
    """Laws [B, N, V] of logits [B, N, V], one Sampling a row."""
    return law(logits, RowSampling.stack(list(samplings), logits.shape[-1], logits.device))


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The law [N, V] by transformers' own warpers."""
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.builds(Sampling, **SETTINGS), st.integers(0, 1000))
def test_the_law_is_that_of_transformers_warpers(sampling, seed):
    logits = 3 * torch.randn(1, 4, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(law_of(logits, sampling)[0], warped(logits[0], sampling), atol=1e-9, rtol=0)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(st.just(Sampling()), st.builds(Sampling, **SETTINGS)), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_a_rows_law_does_not_depend_on_the_settings_beside_it(samplings, seed):
    logits = 3 * torch.randn(len(samplings), 3, V, generator=torch.Generator().manual_seed(seed))
    together = law_of(logits, *samplings)
    for row, sampling in enumerate(samplings):
        torch.testing.assert_close(together[row], law_of(logits[row : row + 1], sampling)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_law_is_float32_or_wider_and_sums_to_one(dtype):
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = law_of(logits, Sampling(temperature=0.7, top_k=9, top_p=0.9))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 3, dtype=found.dtype))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_towards_zero_the_law_becomes_greedy_and_stays_finite(temperature):
    found = law_of(torch.tensor([[[1.0, 0.0]]]), Sampling(temperature=temperature))
    assert found.tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize(
    ("temperature", "first"), [(1, 0.7311), (100, 0.5025), (1e6, 0.5), (1e300, 0.5), (2**31, 0.5)]
)
def test_a_high_temperature_flattens_the_law(temperature, first):
    found = law_of(torch.tensor([[[1.0, 0.0]]]), Sampling(temperature=temperature))
    assert found[0, 0, 0].item() == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize("temperature", [0, 1e-50, 0.5, 1, 1e6, 1e300])
def test_huge_and_forbidden_logits_stay_finite(temperature):
    logits = torch.tensor([[[3e38, -3e38, -torch.inf, 0.0]]])
    found = law_of(logits, Sampling(temperature=temperature, top_k=3, top_p=0.9))
    assert found.isfinite().all()
    assert found[0, 0, 2] == 0
    assert found.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temperature", bad) for bad in (math.inf, math.nan, -1, -1e-9, "hot", None, True)),
        *(("top_p", bad) for bad in (0, 1.5, math.nan, -0.1, "all", None, True)),
        *(("top_k", bad) for bad in (-1, 1.0, math.nan, "one", None, True)),
    ],
)
def test_a_setting_out_of_range_is_refused_in_one_line_with_what_is_allowed(key, value):
    with pytest.raises(
        UserError, match=f"^{key}=.*(finite number|whole number).*(at least|above) 0"
    ) as error:
        Sampling(**{key: value})
    assert "\n" not in str(error.value)


def test_equal_best_logits_go_to_the_lowest_id_at_temperature_zero_and_with_one_kept():
    logits = torch.tensor([[[0.0, 2.0, 2.0, 1.0]]])
    assert law_of(logits, Sampling()).tolist() == [[[0, 1, 0, 0]]]
    assert law_of(logits, Sampling(temperature=1.0, top_p=1e-9)).tolist() == [[[0, 1, 0, 0]]]


@pytest.mark.parametrize("drafter", ["none", "ngram", "sequential", "parallel", "early_exit"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_up_to_a_thousandth_every_drafter_decodes_as_plain_greedy_does(network, drafter, temperature):
    options = {"drafter": drafter, "max_new_tokens": 16}
    greedy = generate(network, [9, 8, 7, 1, 2, 3, 9, 8], max_new_tokens=16)[0].token_ids
    cold = generate(network, [9, 8, 7, 1, 2, 3, 9, 8], sampling=Sampling(temperature=temperature), **options)
    assert cold[0].token_ids == greedy


def test_a_perfect_drafter_is_always_accepted_at_a_tiny_temperature():
    network = Network(table_trunk(successor_table([1, 2, 3, 0])))
    for temperature in TEMPERATURES:
        out = generate(
            network, [0], drafter="early_exit", sampling=Sampling(temperature=temperature), max_new_tokens=20
        )[0]
        assert out.token_ids == [1, 2, 3, 0] * 5
        assert out.acceptance.alpha == 1


def test_one_kept_token_is_greedy_decoding(network):
    greedy = generate(network, [5, 6], max_new_tokens=20)[0].token_ids
    sampling = Sampling(temperature=3.0, top_k=1)
    assert generate(network, [5, 6], sampling=sampling, max_new_tokens=20)[0].token_ids == greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_laws_frequencies(dtype):
    probabilities = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.0, 0.3], dtype=dtype)
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000  # evenly spread: no chance is left
    counts = torch.bincount(draw(probabilities.expand(len(u), -1), u), minlength=6) / len(u)
    torch.testing.assert_close(counts, probabilities.float(), atol=2e-5, rtol=0)


LAW = st.lists(st.sampled_from([0.0, 1e-45, 1e-8, 0.1, 0.25, 1.0, 3.0]), min_size=1, max_size=8).filter(any)
UNIFORM = st.one_of(st.just(0.0), st.just(BELOW_ONE), st.floats(0, BELOW_ONE))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(LAW, UNIFORM)
def test_a_draw_is_the_first_token_whose_cumulated_law_exceeds_u(masses, u):
    """Token x with c(x-1) <= u · total < c(x): of positive probability whatever u is, the ends included."""
    found = draw(torch.tensor([masses]), torch.tensor([u], dtype=torch.float64)).item()
    masses = torch.tensor(masses).double()
    assert masses[found] > 0
    total = masses.sum().item()
    assert masses[:found].sum().item() <= u * total * (1 + 1e-12)
    assert u * total * (1 - 1e-12) <= masses[: found + 1].sum().item()


@pytest.mark.parametrize("u", [0.0, BELOW_ONE])
def test_a_token_of_probability_zero_is_not_drawn_at_the_ends(u):
    for probabilities in ([0.0, 1.0, 0.0], [0.0, 0.3, 0.7, 0.0], [0.0, 0.1, 0.1, 0.1, 0.7, 0.0]):
        for dtype in (torch.float32, torch.float64):
            found = draw(torch.tensor([probabilities], dtype=dtype), torch.tensor([u], dtype=torch.float64))
            assert probabilities[found.item()] > 0


@pytest.mark.parametrize("size", [8, 4096, 50_000])
def test_a_law_that_does_not_quite_sum_to_one_never_draws_beyond_its_tokens(size):
    short = torch.cat([torch.full((1, size), (1 - 1e-4) / size), torch.zeros(1, 5)], dim=1)
    assert draw(short, torch.tensor([BELOW_ONE], dtype=torch.float64)).item() == size - 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.0, math.inf, math.nan]), min_size=3, max_size=70),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_the_best_is_torchs_argmax_whatever_the_numbers(numbers, dtype):
    """Also where several are equal, or none is a number."""
    scores = torch.tensor([[numbers, numbers[::-1]]], dtype=dtype)
    assert torch.equal(best(scores), scores.argmax(-1))
    assert torch.equal(best(scores.transpose(1, 2)), scores.transpose(1, 2).argmax(-1))
    assert torch.equal(best(scores[0].requires_grad_()), scores[0].argmax(-1))


@pytest.mark.parametrize("size", [5, 256, 257, 700, 5000])
@pytest.mark.parametrize("rounded", [False, True])
def test_top_p_among_the_likeliest_keeps_just_what_it_keeps_of_a_sorted_vocabulary(
    monkeypatch, size, rounded
):
    """To the bit, ties included, whether the likeliest hold enough or not."""
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(sampling_module, "dropped_of_best", lambda *_: None)
        for seed, spread, kept in zip(
            range(12), (0.1, 1, 4) * 4, ((0.9, 0.3), (1.0, 0.999), (0.5, 1e-9)) * 4, strict=True
        ):
            logits = spread * torch.randn(2, 2, size, generator=torch.Generator().manual_seed(seed))
            rows = [Sampling(temperature=1.0, top_p=p) for p in kept]
            found.append(law_of(logits.round() if rounded else logits, *rows))
    assert all(map(torch.equal, found[:12], found[12:]))
