"""Lookup against a plain rescan of the whole text, and what it drafts inside the loop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import chain_network

from decoding import generate
from decoding.drafters.ngram import NgramIndex, build
from mtp import UserError

TOKEN = st.integers(0, 2)


class Recording:
    """Passes calls on to a drafter and keeps what it drafted."""

    def __init__(self, drafter):
        self.drafter, self.taps, self.drafts = drafter, drafter.taps, []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, root, num_draft_tokens, context):
        draft = self.drafter.propose(root, num_draft_tokens, context)
        self.drafts.append(draft.tokens[0].tolist())
        return draft


def rescanned(text, root, count, sizes):
    """What followed the longest, then latest place where the end of text + root stood before."""
    line = [*text, root]
    for size in sizes:
        places = [at for at in range(size, len(text)) if text[at - size : at] == line[len(line) - size :]]
        if places:
            return [*text[places[-1] :], root][:count]
    return []


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(TOKEN, max_size=25), TOKEN, st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_the_index_finds_what_a_rescan_of_the_whole_text_finds(text, root, count, smallest, more):
    index = NgramIndex(smallest, smallest + more)
    for place, token in enumerate(text):
        expected = rescanned(text[:place], token, count, index.sizes)
        assert index.continuation(token, count) == expected
        index.append(token)
    assert index.continuation(root, count) == rescanned(text, root, count, index.sizes)


def test_the_longest_match_goes_before_a_later_one():
    index = NgramIndex(1, 3)
    for token in [1, 2, 3, 7, 3, 8, 1, 2]:
        index.append(token)
    assert index.continuation(3, 2) == [7, 3]  # after "1 2 3", not after the later "3"


def test_among_equals_the_latest_match_counts_and_the_root_is_drafted_last():
    index = NgramIndex(1, 4)
    for token in [5, 6, 5, 7]:
        index.append(token)
    assert index.continuation(5, 9) == [7, 5]


@pytest.mark.parametrize(("num_draft_tokens", "steps"), [(1, 4), (3, 4)])
def test_case_6_the_first_draft_is_verified_like_any_other(num_draft_tokens, steps):
    network = chain_network([0, 2, 3, 1])
    out = generate(network, [1, 1, 1], drafter="ngram", num_draft_tokens=num_draft_tokens, max_new_tokens=5)[
        0
    ]
    assert out.token_ids == [2, 3, 1, 2, 3]
    assert out.acceptance.steps == steps
    assert (out.acceptance.tested_at_depth[0], out.acceptance.accepted_at_depth[0]) == (2, 1)


def test_lookup_that_is_always_wrong_is_never_accepted():
    """After 1 comes 1 so far, but the network says otherwise; nothing else stood before."""
    network = chain_network([0, 2, 3, 4, 5, 6, 6])
    out = generate(network, [1, 1, 1], drafter="ngram", num_draft_tokens=1, max_new_tokens=5)[0]
    assert out.token_ids == [2, 3, 4, 5, 6]
    assert out.acceptance.alpha == 0
    assert out.acceptance.tested == 1


def test_a_later_shorter_prompt_and_the_same_one_again_decode_as_in_a_new_process(network):
    long = [token % 7 + token % 5 for token in range(200)]
    short = [*long[:3], 60, 61]
    options = {"num_draft_tokens": 4, "max_new_tokens": 30}
    drafter = build(network)
    for prompt in (long, short, long):
        once = generate(network, prompt, drafter=drafter, **options)[0]
        fresh = generate(network, prompt, drafter="ngram", **options)[0]
        assert (once.token_ids, once.acceptance) == (fresh.token_ids, fresh.acceptance)
        assert once.token_ids == generate(network, prompt, max_new_tokens=30)[0].token_ids


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 64])
def test_no_draft_is_longer_than_asked_for_or_than_what_may_still_come(network, num_draft_tokens):
    recording = Recording(build(network))
    prompt = [*range(40), 0]
    out = generate(network, prompt, drafter=recording, num_draft_tokens=num_draft_tokens, max_new_tokens=20)[
        0
    ]
    lengths = [len(draft) for draft in recording.drafts]
    assert lengths[0] == max(lengths) == min(num_draft_tokens, 19)
    assert out.acceptance.drafted == sum(lengths)
    assert num_draft_tokens or out.acceptance.tau == 1


def test_a_prompt_without_a_repeat_falls_to_plain_decoding():
    network = chain_network([*range(1, 40), 0])
    out = generate(network, [0, 1, 2, 3, 4], drafter="ngram", num_draft_tokens=4, max_new_tokens=20)[0]
    assert out.token_ids == list(range(5, 25))
    assert out.acceptance.drafted == 0
    assert out.acceptance.alpha is None
    assert out.acceptance.tau == 1


@pytest.mark.parametrize(
    ("smallest", "largest"), [(0, 3), (3, 2), (-1, 2), (1.0, 2), (1, 2.5), (True, 4), (None, 4), ("1", 4)]
)
def test_sizes_that_cannot_be_are_refused_with_what_is_allowed(network, smallest, largest):
    with pytest.raises(UserError, match=r"min_ngram=.*max_ngram=.*1 <= min <= max"):
        build(network, smallest, largest)


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (2, 2), (1, 4), (3, 9)])
def test_other_sizes_give_the_same_tokens_with_other_counts(network, smallest, largest):
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    out = generate(network, prompt, drafter=build(network, smallest, largest), max_new_tokens=25)[0]
    assert out.token_ids == generate(network, prompt, max_new_tokens=25)[0].token_ids
