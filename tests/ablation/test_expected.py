"""Expected τ of every length, from one pass or from a replay, and what follows from it."""

import pytest
from tiny import tiny_network

from ablation.compared import comparisons
from ablation.expected import TEMPERATURES, choose, every_length, foretold, speed
from ablation.subject import Subject

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


def drafter(name, **options):
    return {"_target_": f"decoding.drafters.{name}.build"} | options


@pytest.fixture(scope="module")
def subject():
    prompts = {"held_out": PROMPTS, "validation": PROMPTS[:1]}
    return Subject(tiny_network(), "key", prompts, 12, {})


@pytest.mark.parametrize("name", ["sequential", "parallel", "early_exit", "medusa"])
@pytest.mark.parametrize("mode", ["greedy", "token", "block"])
def test_one_pass_tells_what_a_replay_tells(subject, name, mode):
    temperature = TEMPERATURES[mode]
    fast = subject.terms(drafter(name), "held_out", temperature, 4)
    slow = subject.replayed(drafter(name), "held_out", temperature, 4)
    assert [one.heights for one in fast[4]] == [one.heights for one in slow[4]]
    for length in (1, 4):
        for one, other in zip(foretold(mode, length, fast[4]), foretold(mode, length, slow[4]), strict=True):
            assert one.steps == pytest.approx(other.steps, rel=1e-4)
            assert one.tested_at_depth == pytest.approx(other.tested_at_depth, rel=1e-3, abs=1e-6)
            assert one.accepted_at_depth == pytest.approx(other.accepted_at_depth, rel=1e-3, abs=1e-6)


def test_the_sum_of_prompts_is_the_whole(subject):
    found = every_length(subject, drafter("sequential"), "held_out", 3, 2)
    for mode in ("greedy", "token", "block"):
        for length in (1, 2, 3):
            entry = found[mode][length - 1]
            steps = sum(one["steps"][length - 1] for one in found["by_prompt"][mode])
            tokens = sum(one["tokens"] for one in found["by_prompt"][mode])
            assert tokens == entry["tokens"]
            assert steps == pytest.approx(entry["steps"], abs=1e-3)
            assert sum(entry["drafts"]) == pytest.approx(entry["steps"], abs=1e-3)


def test_block_verification_accepts_at_least_as_much_and_longer_drafts_never_less(subject):
    found = every_length(subject, drafter("sequential"), "held_out", 4, 2)
    for token, block in zip(found["token"], found["block"], strict=True):
        assert block["tau"] >= token["tau"] - 1e-9
    taus = [entry["tau"] for entry in found["greedy"]]
    assert taus == sorted(taus)


def test_a_drafter_that_drafts_nothing_gives_one_token_a_step(subject):
    found = every_length(subject, drafter("none"), "held_out", 2, 1)
    assert [entry["tau"] for entry in found["greedy"]] == [1.0, 1.0]
    assert found["greedy"][0]["conditional"] == []


def test_lookup_is_asked_for_every_length(subject):
    found = every_length(subject, drafter("ngram", min_ngram=1, max_ngram=2), "held_out", 2, 2)
    assert [len(entry["drafts"]) for entry in found["greedy"]] == [2, 3]


def entry(length, tokens, drafts):
    return {"length": length, "tokens": tokens, "drafts": drafts}


def test_speed_is_tokens_by_the_price_of_all_steps():
    assert speed(entry(2, 12, [1.0, 1.0, 2.0]), [1.0, 2.0, 4.5]) == 1.0


def test_the_fastest_length_is_chosen_greedily_and_then_its_verifier():
    told = {
        "greedy": [entry(1, 8, [0.0, 5.0]), entry(2, 8, [0.0, 0.0, 4.0])],
        "token": [entry(1, 8, [0.0, 6.0]), entry(2, 8, [0.0, 0.0, 6.0])],
        "block": [entry(1, 8, [0.0, 6.0]), entry(2, 8, [0.0, 0.0, 5.0])],
    }
    assert choose(told, [1.0, 1.0, 1.0]) == {"num_draft_tokens": 2, "verifier": "block"}
    assert choose(told, [1.0, 1.0, 9.0]) == {"num_draft_tokens": 1, "verifier": "token"}


def row(network, seed, taus):
    lines = [
        {"tokens": tokens, "steps": [steps], "tested": [4, 2], "accepted": [2, 1]} for tokens, steps in taus
    ]
    return {
        "setting": "s", "budget": "tokens", "network": network, "drafter": network, "seed": seed,
        "settings": {"num_draft_tokens": 1}, "trunk": {"loss": 2.0, "loss_alone": 1.5},
        "expected": {"greedy": [{}], "by_prompt": {"greedy": lines}},
    }  # fmt: skip


def test_drafters_are_compared_on_the_same_prompts_and_seeds():
    rows = [row("a", 0, [(4, 2), (6, 2)]), row("b", 0, [(3, 2), (5, 2)])]
    found = comparisons(rows)
    assert [one["tau"]["greedy"]["value"] for one in found["groups"]] == [2.5, 2.0]
    assert found["pairs"][0]["tau"]["greedy"] == {"value": 0.5, "interval": [0.5, 0.5]}
    assert found["groups"][0]["loss_change"] == [0.5]
    assert comparisons([rows[0], row("b", 1, [(3, 2), (5, 2)])])["pairs"] == []
