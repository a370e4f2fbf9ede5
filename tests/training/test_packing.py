import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mtp.errors import UserError
from training import packing
from training.packing import Rows, Stream, tokenize
from training.text import Document
from training.tokenizer import train_tokenizer

TRICKY = [
    "plain text, and more of it . isn't it ?\n",
    "a\r\nb\tc  \n\n   d\x00\x0b",
    "naïve — 日本語 🙂 \u2028\u0085",
    "<s>spelt out</s>",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(cache):
    return train_tokenizer([*TRICKY, "the quick brown fox " * 20], 300, cache_dir=cache)


def stream(*lengths: int) -> Stream:
    return Stream(np.arange(100, 100 + sum(lengths), dtype=np.int32), np.array(lengths, np.int64))


def oracle(lengths: list[int], row_length: int, padding: int) -> list[tuple[list[int], list[int]]]:
    """Rows, cut one token at a time."""
    flat = [
        (100 + place, number)
        for place, number in enumerate(n for n, length in enumerate(lengths) for _ in range(length))
    ]
    rows = []
    while len(flat) >= 2:
        row, flat = flat[:row_length], flat[row_length:]
        row += [(padding, -1)] * (row_length - len(row))
        rows.append(([token for token, _ in row], [number for _, number in row]))
    return rows


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    row_length=st.integers(2, 11),
    padding=st.integers(0, 3),
)
def test_rows_are_what_cutting_one_token_at_a_time_gives(lengths, row_length, padding):
    expected = oracle(lengths, row_length, padding)
    trainable = sum(left == right >= 0 for _, documents in expected for left, right in pairwise(documents))
    if not trainable:
        with pytest.raises(UserError):
            Rows(stream(*lengths), row_length, padding=padding)
        return
    rows = Rows(stream(*lengths), row_length, padding=padding)
    assert rows.trainable() == trainable
    assert len(rows) == len(expected)
    found = [
        (rows[number]["tokens"].tolist(), rows[number]["documents"].tolist()) for number in range(len(rows))
    ]
    assert found == expected


def test_the_example_of_the_docstring_holds():
    rows = Rows(stream(3, 4), 4)
    assert rows[0]["documents"].tolist() == [0, 0, 0, 1]
    assert rows[1]["documents"].tolist() == [1, 1, 1, -1]
    assert rows[1]["tokens"].tolist() == [104, 105, 106, 0]
    assert rows[0]["tokens"].dtype == rows[0]["documents"].dtype == torch.int64
    with pytest.raises(IndexError):
        rows[2]


def test_fewer_tokens_than_one_row_are_padded():
    rows = Rows(stream(2), 6, padding=1)
    assert len(rows) == 1
    assert rows[0]["tokens"].tolist() == [100, 101, 1, 1, 1, 1]
    assert rows[0]["documents"].tolist() == [0, 0, -1, -1, -1, -1]


@pytest.mark.parametrize("lengths", [(), (1,), (1, 1, 1)])
def test_nothing_to_train_on_is_refused_with_what_is_needed(lengths):
    with pytest.raises(UserError, match=f"found {len(lengths)} tokens.*at least 2"):
        Rows(stream(*lengths), 4)


def test_reordering_moves_whole_documents():
    moved = stream(2, 3, 1).reordered([2, 0, 1])
    assert moved.tokens.tolist() == [105, 100, 101, 102, 103, 104]
    assert moved.lengths.tolist() == [1, 2, 3]


def test_a_document_is_begin_text_end(tokenizer, cache):
    documents = [Document(str(number), text) for number, text in enumerate(TRICKY)]
    found = tokenize(documents, tokenizer, cache_dir=cache)
    assert found.tokens.dtype == np.int32
    parts = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
    for part, text in zip(parts, TRICKY, strict=True):
        assert (part[0], part[-1]) == (0, 1)
        assert not np.isin(part[1:-1], (0, 1)).any()
        assert tokenizer.decode(part[1:-1]) == text


def test_a_tokenizer_without_begin_and_end_adds_neither(tokenizer, cache):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert (
        tokenize([Document("a", "abc")], bare, cache_dir=cache).tokens.tolist()
        == tokenizer("abc")["input_ids"][1:]
    )


def test_truncation_and_padding_of_the_tokenizer_do_not_reach_the_data(tokenizer, cache):
    short = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    short.enable_truncation(4)
    short.enable_padding(length=50)
    cut = PreTrainedTokenizerFast(tokenizer_object=short, bos_token="<s>", eos_token="</s>")
    documents = [Document("a", "the quick brown fox jumps over")]
    expected = tokenize(documents, tokenizer, cache_dir=cache).tokens.tolist()
    assert tokenize(documents, cut, cache_dir=cache).tokens.tolist() == expected
    assert short.truncation is not None


def test_long_documents_are_tokenised_in_pieces_and_lose_nothing(tokenizer, cache, monkeypatch):
    monkeypatch.setattr(packing, "PIECE", 64)
    monkeypatch.setattr(packing, "BATCH", 150)
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab \n", k=length)) for length in (1, 63, 64, 65, 500, 1000)] + [
        "x" * 300,
        "",
    ]
    found = tokenize([Document(str(n), text) for n, text in enumerate(texts)], tokenizer, cache_dir=cache)
    parts = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
    assert [tokenizer.decode(part[1:-1]) for part in parts] == texts


def test_tokens_come_from_the_cache_and_a_damaged_cache_is_made_anew(tokenizer, tmp_path, monkeypatch):
    documents = [Document("a", "the quick brown fox")]
    first = tokenize(documents, tokenizer, cache_dir=str(tmp_path))
    (stored,) = tmp_path.iterdir()
    content = stored.read_bytes()
    for damage in (b"", b"nonsense", content[:100], content[:-30], content.replace(b"PK", b"XX", 1)):
        stored.write_bytes(damage)
        again = tokenize(documents, tokenizer, cache_dir=str(tmp_path))
        assert again.tokens.tolist() == first.tokens.tolist()
        assert stored.read_bytes() == content
    monkeypatch.setattr(packing, "_encode", lambda *_: pytest.fail("tokenised again"))
    assert tokenize(documents, tokenizer, cache_dir=str(tmp_path)).lengths.tolist() == first.lengths.tolist()


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_time(tokenizer, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    found = tokenize([Document("a", "the fox")], tokenizer, cache_dir=str(tmp_path / "file" / "cache"))
    assert found.lengths.tolist() == [len(found.tokens)]


@given(st.text())
def test_every_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 0
    assert 1 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 1)
    for text in TRICKY:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text


def test_a_tokenizer_has_the_size_asked_for_and_is_always_the_same(tmp_path):
    texts = [" ".join(f"word{number * number % 997}" for number in range(3000))]
    one, two = (train_tokenizer(texts, 500, cache_dir=str(tmp_path / name)) for name in "ab")
    assert len(one) == 500
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    assert one.convert_ids_to_tokens([0, 1]) == ["<s>", "</s>"]


def test_an_endless_word_does_not_stop_the_tokenizer_training(tmp_path):
    texts = ["ab" * 500_000, " " * 1_000_000 + "x", "7" * 1_000_000]
    assert len(train_tokenizer(texts, 270, cache_dir=str(tmp_path))) <= 270


@pytest.mark.parametrize("size", [257, -1, True, "many", 300.5])
def test_a_vocabulary_too_small_for_all_bytes_is_refused(size, tmp_path):
    with pytest.raises(UserError, match="vocab_size must be an integer of at least 258"):
        train_tokenizer(["text"], size, cache_dir=str(tmp_path))


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    row_length=st.integers(2, 11),
    most=st.integers(1, 9),
    depth=st.integers(0, 4),
)
def test_targets_at_a_depth_are_counted_as_the_rows_have_them(lengths, row_length, most, depth):
    try:
        rows = Rows(stream(*lengths), row_length, most=most)
    except UserError:
        return
    numbers = [rows[row]["documents"].tolist() for row in range(len(rows))]
    expected = sum(1 for row in numbers for a, b in zip(row, row[depth + 1 :], strict=False) if a == b != -1)
    assert rows.trainable(depth) == expected


def test_learned_tokens_behind_the_rows_that_are_kept_are_no_targets():
    learned = np.array([False] * 6 + [True] * 2)
    made = Stream(np.arange(8, dtype=np.int32), np.array([8]), learned)
    assert Rows(made, 4).trainable() == 2
    with pytest.raises(UserError, match="to be learned"):
        Rows(made, 4, most=1)
