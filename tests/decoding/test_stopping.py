"""EOS, stop string or limit end the output wherever in a block they lie: ids, text and stream alike."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer, chain_network, spelling_network

from decoding import generate
from decoding.stopping import Limits, Output, check_stop
from mtp import UserError

DRAFTERS = ("none", "ngram", "sequential", "parallel", "early_exit")
CHAIN = {5: 6, 6: 7, 7: 2, 2: 9, 9: 10, 10: 11, 11: 5}
SUCCESSORS = [CHAIN.get(token, token) for token in range(12)]
PROMPT = [5, 6, 7, 2, 9, 10, 11, 5]
FOLLOWING = [6, 7, 2, 9, 10, 11, 5]  # what comes after the prompt, over and over


class Parts:
    """A tokenizer whose token i is the text parts[i]."""

    def __init__(self, parts):
        self.parts = parts

    def decode(self, ids, **_):
        return "".join(self.parts[token] for token in ids)


@pytest.fixture(scope="module")
def chain():
    return chain_network(SUCCESSORS)


@pytest.fixture(scope="module")
def spelling():
    return spelling_network("abcSTOPdefSTOPxyz")


def decoded(network, prompt, drafter, **options):
    """The completion and all that was streamed: (completion, token ids, text)."""
    seen = []
    completion = generate(network, prompt, drafter=drafter, observe=seen.append, **options)[0]
    assert all(len(emitted.pieces) == len(emitted.tokens) for emitted in seen)
    streamed = [token for emitted in seen for token in emitted.tokens]
    return completion, streamed, "".join(piece for emitted in seen for piece in emitted.pieces)


@pytest.mark.parametrize("eos", FOLLOWING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_eos_anywhere_in_a_block_and_as_its_bonus_ends_the_output(chain, drafter, eos):
    """Six drafts are all accepted, so the EOS is block position 1 ... 6 or the bonus; those in the prompt do
    nothing."""
    out, streamed, _ = decoded(
        chain, PROMPT, drafter, num_draft_tokens=6, max_new_tokens=20, eos_token_ids=eos
    )
    assert out.token_ids == FOLLOWING[: FOLLOWING.index(eos) + 1]
    assert out.finish_reason == "eos"
    assert streamed == out.token_ids
    assert out.acceptance.emitted == len(out.token_ids)
    blocks = {"none": 1, "parallel": 5}.get(drafter, 7)  # tokens a step emits at most
    assert out.acceptance.steps == -(-len(out.token_ids) // blocks)


@pytest.mark.parametrize("eos", [[2, 10], [10, 2], [10, 9, 2]])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_of_several_eos_ids_the_one_that_comes_first_ends_the_output(chain, drafter, eos):
    out = generate(chain, PROMPT, drafter=drafter, num_draft_tokens=6, max_new_tokens=20, eos_token_ids=eos)
    assert out[0].token_ids == [6, 7, 2]
    assert out[0].finish_reason == "eos"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_without_an_eos_all_tokens_asked_for_come(chain, drafter):
    for eos in (None, ()):  # the network itself has none
        out = generate(
            chain, PROMPT, drafter=drafter, num_draft_tokens=6, max_new_tokens=20, eos_token_ids=eos
        )
        assert out[0].token_ids == (FOLLOWING * 3)[:20]
        assert out[0].finish_reason == "length"


def test_the_networks_own_eos_is_the_generation_configs_before_the_configs():
    network = chain_network(SUCCESSORS)
    network.trunk.config.eos_token_id = 9
    assert generate(network, PROMPT, max_new_tokens=20)[0].token_ids == [6, 7, 2, 9]
    network.trunk.model.generation_config.eos_token_id = [2]
    assert generate(network, PROMPT, max_new_tokens=20)[0].token_ids == [6, 7, 2]
    assert len(generate(network, PROMPT, max_new_tokens=20, eos_token_ids=())[0].token_ids) == 20


@pytest.mark.parametrize("eos", ["2", [2.0], [True], -1, [None]])
def test_an_eos_that_is_no_token_id_is_refused(chain, eos):
    with pytest.raises(UserError, match="eos_token_ids="):
        generate(chain, PROMPT, eos_token_ids=eos)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_eos_goes_before_the_limit_when_both_come_with_one_token(chain, limit):
    out = generate(
        chain, PROMPT, drafter="early_exit", num_draft_tokens=6, max_new_tokens=limit, eos_token_ids=2
    )
    assert out[0].finish_reason == ("eos" if limit >= 3 else "length")


def check_stopped(network, prompt, drafter, num_draft_tokens, stop, text):
    """Ids, text and stream all end with the stop string."""
    out, streamed, shown = decoded(
        network, prompt, drafter, num_draft_tokens=num_draft_tokens, stop=stop, max_new_tokens=30
    )
    assert out.text == shown == text
    assert out.token_ids == streamed == [byte + 2 for byte in text.encode()]
    assert out.finish_reason == "stop"
    assert out.acceptance.emitted == len(out.token_ids)


@pytest.mark.parametrize("num_draft_tokens", [3, 4, 7, 12])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ids_text_and_stream_all_end_with_a_stop_string(spelling, drafter, num_draft_tokens):
    check_stopped(spelling, "a", drafter, num_draft_tokens, ["STOP"], "bcSTOP")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("STOP", "bcSTOP"),
        (["PQ", "TO"], "bcSTO"),
        (["TOP", "STOP"], "bcSTOP"),
        (["ST", "bcSTO"], "bcST"),
        (["b"], "b"),
        (["dS", "dd", "STOPd"], "bcSTOPd"),
        (["xyz", "OPdefSTO"], "bcSTOPdefSTO"),
    ],
)
@pytest.mark.parametrize("drafter", ["none", "early_exit"])
def test_of_several_stop_strings_the_one_that_is_complete_first_counts(spelling, drafter, stop, text):
    check_stopped(spelling, "a", drafter, 12, stop, text)


def test_a_stop_string_in_the_prompt_or_begun_there_does_not_count(spelling):
    out = generate(spelling, "abcSTO", stop=["STOP", "OP"], max_new_tokens=12)[0]
    assert out.text == "PdefSTOP"


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_string_whose_bytes_lie_in_two_blocks_is_found(drafter, num_draft_tokens):
    network = spelling_network("ab世cd🙂!")
    for stop, text in (("世", "b世"), ("🙂", "b世cd🙂"), ("d🙂!", "b世cd🙂!")):
        check_stopped(network, "a", drafter, num_draft_tokens, stop, text)


def test_bytes_that_are_still_pending_are_no_replacement_mark():
    out = generate(spelling_network("ab🙂c"), "a", stop="\ufffd", max_new_tokens=6)[0]
    assert out.text == "b🙂c"
    assert out.finish_reason == "length"


def test_a_criterion_met_inside_a_character_leaves_a_mark():
    """The criterion sees prompt and output; only a stop string cuts the text."""
    ids = [byte + 2 for byte in "a🙂".encode()]
    limits = Limits(9, stop=("x",), criteria=(lambda text: len(text) == 5,))
    output = Output([67, 67], limits, byte_tokenizer())
    assert [output.push(token) for token in ids[:3]] == [False, False, True]
    assert (output.text, output.finish_reason) == ("a\ufffd", "stop")


def test_each_row_may_have_stop_strings_of_its_own(spelling):
    rows = generate(spelling, ["a"] * 3, stop=[["c"], [], ["TO", "x"]], max_new_tokens=8)
    assert [row.text for row in rows] == ["bc", "bcSTOPde", "bcSTO"]


def test_stop_strings_for_another_number_of_rows_are_refused(spelling):
    with pytest.raises(UserError, match="stop: 1 values for 2 prompts"):
        generate(spelling, ["a", "b"], stop=[["c"]])


@pytest.mark.parametrize("stop", ["", [""], ["x", ""], [5], [None], [["x"]]])
def test_an_empty_stop_string_or_what_is_none_is_refused(stop):
    with pytest.raises(UserError, match="is not a text of at least one character"):
        check_stop(stop, byte_tokenizer())


def test_text_to_stop_at_needs_a_tokenizer():
    with pytest.raises(UserError, match="no tokenizer"):
        check_stop("x", None)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_token_that_completes_a_stop_string_is_the_last_and_the_text_ends_inside_it(parts, stops):
    """Tokens of several characters against the plain definition over the whole text."""
    output = Output([], Limits(len(parts), stop=tuple(stops)), Parts(parts))
    pieces = []
    for token in range(len(parts)):
        ended = output.push(token)
        pieces.append(output.new_text())
        if ended:
            break
    whole = "".join(parts)
    end = min((whole.find(s) + len(s) for s in stops if s in whole), default=len(whole))
    used = next(n for n in range(1, len(parts) + 1) if len("".join(parts[:n])) >= end)
    assert output.text == "".join(pieces) == whole[:end]
    assert output.token_ids == list(range(used))
    assert output.finish_reason == ("stop" if any(s in whole for s in stops) else "length")
