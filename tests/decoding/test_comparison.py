"""A drafter beside plain decoding."""

import time

import pytest

from decoding.comparison import compare, counts, greedy, speeds
from decoding.draft import Autoregressive
from decoding.generate import build_drafter
from decoding.timed import Timed

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6]]


class Slow(Autoregressive):
    """Drafts nothing and takes a while for it."""

    def propose(self, root, num_draft_tokens, context):
        time.sleep(0.002)
        return super().propose(root, num_draft_tokens, context)


def trials(network, drafter, repeats=2):
    return compare(network, drafter, PROMPTS, repeats=repeats, max_new_tokens=12, num_draft_tokens=3)


@pytest.mark.parametrize("name", ["ngram", "sequential", "parallel", "early_exit"])
def test_a_drafter_is_compared_on_every_prompt(network, name):
    found = greedy(trials(network, build_drafter(network, name)))
    assert found["identical"]
    assert [prompt["tokens"] for prompt in found["prompts"]] == [12, 12]
    assert found["emitted"] == 24
    assert found["speedup"] == pytest.approx(found["tokens_per_second"] / found["plain_tokens_per_second"])
    assert found["draft_cost"] > 0


def test_where_nothing_is_drafted_there_is_no_acceptance_and_no_draft_cost(network):
    found = greedy(trials(network, Autoregressive()))
    assert (found["tau"], found["alpha"], found["conditional"], found["draft_cost"]) == (1.0, None, [], None)


def test_a_slow_drafter_is_seen_to_be_slow(network):
    done = trials(network, Slow())
    assert all(0.002 * 12 <= trial.draft_seconds <= trial.seconds for trial in done)
    assert speeds(done)["speedup"] < 1


def test_the_stopwatch_starts_anew_with_every_text(network):
    timed = Timed(Slow())
    for _ in range(2):
        done = compare(network, timed, PROMPTS[:1], repeats=1, max_new_tokens=5, num_draft_tokens=3)
        assert 0.010 <= timed.seconds <= done[0].seconds


def test_other_ids_in_any_repeat_are_noticed(network, monkeypatch):
    import decoding.comparison as comparison

    honest, calls = comparison.generate, []

    def cheating(network, prompt, **options):
        calls.append(prompt)
        done = honest(network, prompt, **options)
        if len(calls) == 6:  # after two to warm up, the last of four
            done[0].token_ids[-1] += 1
        return done

    monkeypatch.setattr(comparison, "generate", cheating)
    done = compare(network, Autoregressive(), PROMPTS[:1], repeats=2, max_new_tokens=5, num_draft_tokens=3)
    assert len(calls) == 6
    assert not done[0].identical


def test_counts_add_up_over_prompts(network):
    done = trials(network, build_drafter(network, "sequential"), repeats=1)
    found = counts([trial.drafted for trial in done])
    assert found["steps"] == sum(trial.drafted.acceptance.steps for trial in done)
    assert found["tau"] == found["emitted"] / found["steps"]
