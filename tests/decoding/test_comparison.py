"""A drafter beside plain decoding."""

import time

import pytest
from drafters import tiny_draft

import decoding.contest as contest
from decoding.comparison import compare, counts, greedy, speeds
from decoding.contest import maker
from decoding.draft import Autoregressive
from decoding.timed import Timed

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6]]


class Slow(Autoregressive):
    """Drafts nothing and takes a while for it."""

    def propose(self, root, num_draft_tokens, context):
        time.sleep(0.002)
        return super().propose(root, num_draft_tokens, context)


def trials(network, build, repeats=2):
    return compare(network, build, PROMPTS, repeats=repeats, max_new_tokens=12, num_draft_tokens=3)


@pytest.mark.parametrize("name", ["ngram", "sequential", "parallel", "early_exit"])
def test_a_drafter_is_compared_on_every_prompt(network, name):
    found = greedy(trials(network, maker(network, name, {})))
    assert found["identical"]
    assert [prompt["tokens"] for prompt in found["prompts"]] == [12, 12]
    assert found["emitted"] == 24
    assert found["speedup"] == pytest.approx(found["tokens_per_second"] / found["plain_tokens_per_second"])
    assert found["draft_cost"] > 0


def test_where_nothing_is_drafted_there_is_no_acceptance_and_no_draft_cost(network):
    found = greedy(trials(network, Autoregressive))
    assert (found["tau"], found["alpha"], found["conditional"], found["draft_cost"]) == (1.0, None, [], None)


def test_a_slow_drafter_is_seen_to_be_slow(network):
    done = trials(network, Slow)
    assert all(0.002 * 12 <= trial.draft_seconds <= trial.seconds for trial in done)
    assert speeds(done)["speedup"] < 1


def test_the_stopwatch_starts_anew_with_every_text(network):
    timed = Timed(Slow())
    for _ in range(2):
        run = contest.Ours("slow", network, lambda: timed, num_draft_tokens=3)(PROMPTS[0], 5)
        assert 0.010 <= timed.seconds <= run.seconds


def test_the_stopwatch_knows_the_time_of_every_step(network):
    timed = Timed(Slow())
    contest.Ours("slow", network, lambda: timed, num_draft_tokens=3)(PROMPTS[0], 5)
    assert len(timed.steps()) == 5
    assert all(seconds >= 0.002 for seconds in timed.steps())
    assert sum(timed.steps()) <= timed.seconds


def test_other_ids_in_any_repeat_are_noticed(network, monkeypatch):
    honest, calls = contest.generate, []

    def cheating(network, prompt, **options):
        calls.append(prompt)
        done = honest(network, prompt, **options)
        if len(calls) == 6:  # after two to warm up, the last of four
            done[0].token_ids[-1] += 1
        return done

    monkeypatch.setattr(contest, "generate", cheating)
    done = compare(network, Autoregressive, PROMPTS[:1], repeats=2, max_new_tokens=5, num_draft_tokens=3)
    assert len(calls) == 6
    assert not done[0].identical


def test_counts_add_up_over_prompts(network):
    done = trials(network, maker(network, "sequential", {}), repeats=1)
    found = counts([trial.drafted for trial in done])
    assert found["steps"] == sum(trial.drafted.acceptance.steps for trial in done)
    assert found["tau"] == found["emitted"] / found["steps"]


def test_a_drafter_that_remembers_earlier_outputs_is_new_in_every_run(network):
    trial = compare(
        network, maker(network, "suffix", {}), PROMPTS[1:], repeats=3, max_new_tokens=40, num_draft_tokens=4
    )[0]
    alone = contest.Ours("suffix", network, maker(network, "suffix", {}), num_draft_tokens=4)
    again = [alone(PROMPTS[1], 40).completion.acceptance.steps for _ in range(2)]
    assert again == [trial.drafted.acceptance.steps] * 2
    remembering = maker(network, "suffix", {})()
    kept = contest.Ours("suffix", network, lambda: remembering, num_draft_tokens=4)
    first, second = (kept(PROMPTS[1], 40).completion.acceptance.steps for _ in range(2))
    assert second < first  # it does remember, where it may


def test_automatic_length_measures_once_and_not_in_every_run(network):
    ours = contest.Ours("auto", network, maker(network, "ngram", {}), num_draft_tokens="auto")
    ours(PROMPTS[0], 20)
    known = dict(ours.known.costs)
    ours(PROMPTS[0], 20)
    assert len(known) == 1
    assert ours.known.costs == known


def test_a_draft_model_is_loaded_once(network, tmp_path, monkeypatch):
    tiny_draft(network).save_pretrained(tmp_path / "draft")
    build = maker(network, "draft_model", {"model": str(tmp_path / "draft")})
    monkeypatch.setattr("mtp.Network.from_pretrained", None)
    assert build() is not build()
