"""The suffix index says what a rescan says; the drafter indexes what became true and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import check_law
from tiny import successor_table, table_trunk, tiny_network

from decoding import Sampling, generate
from decoding.generate import build_drafter
from decoding.suffix_index import SLACK, START, Rule, SuffixIndex
from mtp import Network, UserError

PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8], [7, 8, 9, 7, 8, 9, 7, 8]]
GREEDY_RULE = Rule(factor=1.0, offset=0.0, min_token_prob=0.0, min_match=1)
LINE = st.lists(st.integers(0, 2), max_size=14)
RULES = st.builds(
    Rule,
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    offset=st.sampled_from([-1.0, 0.0, 1.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.4]),
    min_match=st.integers(1, 2),
)


def ids(completions):
    return [completion.token_ids for completion in completions]


def index_of(lines, depth=8):
    index = SuffixIndex(depth)
    for line in lines:
        index.begin()
        for token in line:
            index.append(token)
    return index


def place_of(index, text):
    place = START
    for token in text:
        place = index.advance(place, token)
    return place


def ends(lines, text):
    """Where `text` ends in the lines: (line, position behind it)."""
    size = len(text)
    return [
        (n, at)
        for n, line in enumerate(lines)
        for at in range(size, len(line) + 1)
        if line[at - size : at] == text
    ]


def followed(lines, text, most, least, depth):
    """What mostly followed, step by step, of equals the latest; counted by rescanning."""
    tokens, expected, probability = [], 0.0, 1.0
    while len(tokens) < most:
        places = ends(lines, text)
        after = [lines[n][at] for n, at in places if at < len(lines[n])]
        if not after:
            break
        best = max(set(after), key=lambda token: (after.count(token), len(after) - after[::-1].index(token)))
        probability *= after.count(best) / len(places)
        if probability < least:
            break
        tokens.append(best)
        expected += probability
        text = [*text, best][-depth:]
    return tokens, expected


def rescanned(lines, text, count, rule, depth):
    """The best continuation over all lengths of a match, of equals that of the longest."""
    best = ([], 0.0)
    for length in range(min(depth, len(text)), rule.min_match - 1, -1):
        most = min(count, rule.most(length))
        if most - best[1] < SLACK:
            break
        if ends(lines, text[-length:]):
            found = followed(lines, text[-length:], most, rule.min_token_prob, depth)
            best = found if found[1] > best[1] else best
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(LINE, min_size=1, max_size=3), LINE, RULES, st.integers(1, 6), st.integers(0, 5))
def test_an_index_continues_like_a_rescan(lines, text, rule, depth, count):
    index = index_of(lines, depth)
    tokens, expected = index.continuation(place_of(index, text), count, rule)
    again, exactly = rescanned(lines, text, count, rule, depth)
    assert tokens == again
    assert expected == pytest.approx(exactly)


@settings(max_examples=100, deadline=None)
@given(LINE, RULES, st.integers(1, 6))
def test_the_end_of_a_growing_line_is_always_known(line, rule, depth):
    index = SuffixIndex(depth)
    for at, token in enumerate(line):
        found = index.continuation(index.advance(index.end, token), 4, rule)
        assert found[0] == rescanned([line[:at]], line[: at + 1], 4, rule, depth)[0]
        index.append(token)


@settings(max_examples=100, deadline=None)
@given(LINE, LINE, st.integers(1, 6))
def test_a_place_stays_good_while_the_index_grows(line, text, depth):
    """A string that is found once is found for ever, whatever states are split."""
    index = index_of([line], depth)
    place = place_of(index, text)
    known = text[len(text) - place[1] :]
    for token in [2, 0, *line, 1, *line[::-1]]:
        index.append(token)
    whole = [*line, 2, 0, *line, 1, *line[::-1]]
    found = index.continuation(place, 4, GREEDY_RULE)
    assert found[0] == rescanned([whole], known, 4, GREEDY_RULE, depth)[0]


@pytest.mark.parametrize(
    "text", [[1] * 3000, [1, 2] * 1500, list(range(3000)), [n % 7 * n % 11 for n in range(3000)]]
)
def test_an_index_has_at_most_two_states_a_token(text):
    assert len(index_of([text], 64).link) <= 2 * len(text) + 1


@pytest.mark.parametrize(
    ("text", "root", "rule", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 3, {}, [4, 5, 1]),  # three tokens match: three are drafted
        ([1, 2, 3, 4, 5, 1, 2], 3, {"factor": 1.0, "offset": -2.0}, [4]),
        ([1, 2, 3, 4, 5, 1, 2], 3, {"factor": 2.0}, [4, 5, 1, 2]),  # the text ends there
        ([1, 2, 3, 4, 5, 1, 2], 3, {"min_match": 4}, []),
        ([7, 3, 8, 3, 9, 3, 8, 5], 3, {}, [8]),  # more often than 9
        ([7, 3, 8, 3, 9, 5], 3, {}, [9]),  # as often as 8, but later
        ([7, 3, 8, 3, 9, 3, 8, 5], 3, {"min_token_prob": 0.7}, []),  # two of three
        ([1, 2, 3, 4], 9, {"factor": 5.0}, []),  # the root never stood before
        ([1, 2, 3, 4], 4, {"factor": 5.0}, []),  # nothing has followed it yet
    ],
)
def test_what_is_drafted_and_how_far(text, root, rule, expected):
    index = index_of([text])
    options = {"factor": 1.0, "offset": 0.0, "min_token_prob": 0.1, "min_match": 1} | rule
    assert index.continuation(index.advance(index.end, root), 8, Rule(**options))[0] == expected


class Checking:
    """Compares every draft with a rescan of the text that the drafter has, and keeps these texts."""

    def __init__(self, drafter):
        self.drafter, self.taps, self.texts = drafter, (), []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, root, num_draft_tokens, context):
        draft = self.drafter.propose(root, num_draft_tokens, context)
        rule, depth = self.drafter.rule, self.drafter.depth
        for row, line in enumerate(self.drafter.lines):
            text = [*line.text, int(root[row])]
            most = max(0, min(num_draft_tokens, context.room[row]))
            drafted = draft.tokens[row][draft.parents[row] >= 0].tolist()
            assert drafted == rescanned([line.text], text, most, rule, depth)[0]
            self.texts.append(text)
        assert draft.q is None
        return draft


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 64])
def test_only_true_tokens_are_indexed_and_the_flag_is_kept(network, num_draft_tokens):
    drafter = Checking(build_drafter(network, "suffix", global_tokens=0))
    out = generate(network, PROMPTS, drafter=drafter, num_draft_tokens=num_draft_tokens, max_new_tokens=40)
    assert ids(out) == ids(generate(network, PROMPTS, max_new_tokens=40))
    whole = [o.prompt_ids + o.token_ids for o in out]
    assert all(any(text == line[: len(text)] for line in whole) for text in drafter.texts)
    assert num_draft_tokens == 0 or sum(o.acceptance.accepted for o in out) > 0


@pytest.mark.parametrize("name", ["suffix", "ngram"])
@pytest.mark.parametrize("num_draft_tokens", [0, 4, 64])
def test_a_long_prompt_a_short_one_and_the_long_one_again(network, name, num_draft_tokens):
    long = [*range(20), *range(30)] * 4
    short = long[:3] + [60, 61]
    drafter = build_drafter(network, name)
    for prompt in (long, short, long, list(range(10, 60))):
        options = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": 8}
        out = generate(network, prompt, drafter=drafter, **options)[0]
        fresh = generate(network, prompt, drafter=name, **options)[0]
        assert out.token_ids == fresh.token_ids == generate(network, prompt, max_new_tokens=8)[0].token_ids
        if name == "ngram":
            assert out.acceptance == fresh.acceptance


def counting():
    """A network that counts up to 40 and starts again: nothing is said twice in 40 tokens."""
    return Network(table_trunk(successor_table([*range(1, 40), 0])))


def test_earlier_outputs_are_drafted_in_later_calls():
    network = counting()
    drafter = build_drafter(network, "suffix")
    first, second = (generate(network, [3], drafter=drafter, max_new_tokens=30)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.acceptance.accepted == 0
    assert second.acceptance.tau > 3


def test_earlier_outputs_can_be_left_out():
    network = counting()
    drafter = build_drafter(network, "suffix", global_tokens=0)
    for _ in range(2):
        assert generate(network, [3], drafter=drafter, max_new_tokens=30)[0].acceptance.accepted == 0
    assert drafter.earlier == []


def test_earlier_outputs_are_forgotten_in_halves():
    network = counting()
    drafter = build_drafter(network, "suffix", global_tokens=60)
    sizes = []
    for start in (0, 20, 5, 25, 0):
        generate(network, [start], drafter=drafter, max_new_tokens=21)
        sizes.append([index.size for index in drafter.earlier])
    assert sizes == [[], [21], [21, 21], [21, 21], [21, 21]]  # and the prompt's last token, less the last
    newer, older = drafter.earlier
    assert place_of(newer, range(25, 30))[1] == place_of(older, range(5, 10))[1] == 5
    assert place_of(newer, range(10, 15))[1] == place_of(older, range(30, 35))[1] == 0


def test_one_long_output_does_not_outgrow_the_memory():
    network = counting()
    drafter = build_drafter(network, "suffix", global_tokens=20)
    for _ in range(3):
        generate(network, [0], drafter=drafter, max_new_tokens=35)
        assert all(index.size <= 10 for index in drafter.earlier)


def test_rows_that_finish_early_are_remembered_and_seen_by_no_row_of_their_batch():
    network = counting()
    drafter = build_drafter(network, "suffix")
    generate(network, [36], drafter=drafter, max_new_tokens=3)
    out = generate(network, [[3], [20], [3]], drafter=drafter, max_new_tokens=[25, 6, 30])
    assert [o.acceptance.accepted for o in out] == [0, 0, 0]
    out = generate(network, [[20], [3]], drafter=drafter, max_new_tokens=[5, 30])
    assert all(o.acceptance.accepted > 2 for o in out)


def test_a_seed_repeats_in_any_company(network):
    options = {"drafter": "suffix", "sampling": Sampling(temperature=0.4), "max_new_tokens": 25}
    together = generate(network, PROMPTS, seed=[1, 7, 2, 5], **options)
    assert sum(row.acceptance.tested for row in together) > 5
    for prompt, seed, row in zip(PROMPTS, [1, 7, 2, 5], together, strict=True):
        assert generate(network, prompt, seed=seed, **options)[0].token_ids == row.token_ids


def test_lookup_in_the_text_and_in_earlier_outputs_keeps_the_law():
    network = tiny_network(seed=2, vocab_size=6, layers=2)
    drafter = build_drafter(network, "suffix", factor=2.0)
    generate(network, [[1, 2, 3]] * 5, drafter=drafter, sampling=Sampling(1.0), max_new_tokens=20)
    alpha = check_law(network, [1, 2, 1, 2, 1], drafter=drafter, num_draft_tokens=3, verifier="block")
    assert len(drafter.earlier) == 1
    assert 0.1 < alpha < 0.9


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 0}, {"depth": 2.5}, {"factor": -1.0}, {"offset": float("nan")}, {"min_token_prob": 1.5},
        {"min_match": 0}, {"global_tokens": -1}, {"global_tokens": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_option_is_named(network, options):
    with pytest.raises(UserError, match=next(iter(options))):
        build_drafter(network, "suffix", **options)
