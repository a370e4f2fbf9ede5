"""Text comes out piece by piece: never half a character, never one twice, and together the whole text."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer, chain_network, spelling_network

from decoding import generate
from decoding.terminal import Terminal
from decoding.text import REPLACEMENT, Detokenizer

DRAFTERS = ("none", "ngram", "sequential", "parallel", "early_exit")
TEXT = "A 世a🙂é\n"
TOKENIZER = byte_tokenizer()
HARD = st.sampled_from(
    [b"A", b"\n", " 世".encode(), "🙂".encode(), "é".encode(), b"\xff", b"\xe4\xb8", b"\xf0", b"\x82"]
)


@pytest.fixture(scope="module")
def network():
    return spelling_network(TEXT)


def decoded(network, prompt, **options):
    """The completion and its streamed pieces."""
    seen = []
    completion = generate(network, prompt, observe=seen.append, **options)[0]
    return completion, [piece for emitted in seen for piece in emitted.pieces]


@pytest.mark.parametrize("num_draft_tokens", [3, 6])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_streamed_pieces_are_the_text_without_a_mark_or_a_repeat(network, drafter, num_draft_tokens):
    out, pieces = decoded(network, "A", drafter=drafter, num_draft_tokens=num_draft_tokens, max_new_tokens=25)
    assert out.text == "".join(pieces) == " 世a🙂é\nA 世a🙂é\n"
    assert out.text == network.tokenizer.decode(out.token_ids)
    assert REPLACEMENT not in out.text
    assert [piece for piece in pieces if piece] == list(out.text)  # each character with its last byte


@pytest.mark.parametrize("limit", [1, 3, 6, 7, 8, 9, 11])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_cut_inside_a_character_ends_in_a_mark_in_stream_and_text_alike(network, drafter, limit):
    out, pieces = decoded(network, "A", drafter=drafter, num_draft_tokens=6, max_new_tokens=limit)
    expected = TEXT.encode()[1 : 1 + limit].decode(errors="replace")
    assert out.text == "".join(pieces) == expected
    assert out.text == network.tokenizer.decode(out.token_ids)
    assert REPLACEMENT not in "".join(pieces[:-1])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_eos_inside_a_character_leaves_a_mark(drafter):
    network = spelling_network(TEXT)
    out, pieces = decoded(
        network, "A", drafter=drafter, num_draft_tokens=6, max_new_tokens=25, eos_token_ids=0x9F + 2
    )
    assert out.text == "".join(pieces) == " 世a\ufffd"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_bytes_that_are_no_character_become_a_mark_once_that_is_certain(drafter):
    network = spelling_network(b"a\xffb\xe4\xb8c")
    out, pieces = decoded(network, "a", drafter=drafter, num_draft_tokens=4, max_new_tokens=11)
    assert out.text == "".join(pieces) == "\ufffdb\ufffdca\ufffdb\ufffdc"
    assert out.text == network.tokenizer.decode(out.token_ids)
    assert pieces[:2] == ["", "\ufffdb"]


def test_a_network_that_only_ever_says_an_impossible_byte_ends_in_marks():
    out, pieces = decoded(spelling_network(b"\xff"), [0xFF + 2], max_new_tokens=5)
    assert out.text == "".join(pieces) == "\ufffd" * 5
    assert pieces[:-1] == [""] * 4


def test_special_tokens_have_no_text():
    successors = [67, 0, *range(2, 258)]
    successors[66] = 1  # @ </s> <s> A A ...
    out, pieces = decoded(chain_network(successors, tokenizer=TOKENIZER), "@", max_new_tokens=4)
    assert out.token_ids == [1, 0, 67, 67]
    assert out.text == "".join(pieces) == "AA"


def test_a_network_without_a_tokenizer_has_no_text():
    out, pieces = decoded(chain_network([1, 2, 0]), [0], max_new_tokens=4)
    assert out.text is None
    assert out.prompt is None
    assert pieces == [""] * 4


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(HARD, min_size=1, max_size=8).map(b"".join), st.data())
def test_any_bytes_in_any_order_come_out_as_the_decoder_reads_them_in_one_go(data, draw):
    """From any place in the text on: what was streamed is what the whole text has beyond the prompt's."""
    ids = [byte + 2 for byte in data]
    start = draw.draw(st.integers(0, len(ids)), label="prompt")
    detokenizer, whole = Detokenizer(TOKENIZER, ids[:start]), TOKENIZER.decode(ids)
    expected = whole[len(TOKENIZER.decode(ids[:start])) :]
    shown = ""
    for token in ids[start:]:
        shown += detokenizer.push(token)
        assert detokenizer.text == shown
        assert expected.startswith(shown)
    assert shown + detokenizer.flush() == detokenizer.text == expected


def test_a_long_text_costs_the_same_for_every_token():
    """Only a few tokens are decoded at a time, however many came before."""
    lengths = []

    class Counting:
        def decode(self, ids, **_):
            lengths.append(len(ids))
            return TOKENIZER.decode(ids)

    detokenizer = Detokenizer(Counting(), [67] * 50)
    for byte in ("a世🙂" * 40).encode():
        detokenizer.push(byte + 2)
    assert detokenizer.text == "a世🙂" * 40
    assert max(lengths) <= 12


@pytest.mark.parametrize(
    "text", ["a\tb", "\t", "x\r\ny", "a\x0cb", "  two  \n\n", "[bold]x[/bold] :smile:", TEXT * 30]
)
def test_what_is_printed_is_the_text_to_the_last_character(text):
    file = io.StringIO()
    network = spelling_network("ab")
    terminal = Terminal(file)
    terminal.begin(text, network.tokenizer)
    completions = generate(network, "a", max_new_tokens=3, observe=terminal.show)
    terminal.end(completions)
    assert file.getvalue() == text + "bab\n"


def test_a_terminal_that_knows_only_ascii_shows_escapes():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
    network = spelling_network(TEXT)
    terminal = Terminal(file)
    terminal.begin("A", network.tokenizer)
    terminal.end(generate(network, "A", max_new_tokens=12, observe=terminal.show))
    file.flush()
    assert file.buffer.getvalue() == b"A \\u4e16a\\U0001f642\\xe9\n\n"


def test_accepted_drafts_look_different_from_the_trunks_own_tokens(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    terminal = Terminal(file)
    generate(
        spelling_network("abcdef"), "a", drafter="early_exit", num_draft_tokens=2, max_new_tokens=3,
        observe=terminal.show,
    )  # fmt: skip
    assert file.getvalue() == "\x1b[1;32mb\x1b[0m\x1b[1;32mc\x1b[0md"
