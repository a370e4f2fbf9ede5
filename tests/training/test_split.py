import hashlib
import random

import numpy as np
import pytest

from mtp.errors import UserError
from training import near_duplicates
from training.near_duplicates import near_pairs, signatures
from training.prompts import held_out_documents, prompts
from training.split import cluster_keys, split, split_of
from training.text import Document, Stdlib
from training.tokenizer import train_tokenizer

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "mu",
    "nu",
    "xi",
    "pi",
]


@pytest.fixture(scope="module")
def library() -> list[Document]:
    return Stdlib().documents()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def text(seed: int, words: int = 300) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def changed(original: str, every: int) -> str:
    words = original.split()
    words[::every] = ["other"] * len(words[::every])
    return " ".join(words)


def jaccard(left: str, right: str) -> float:
    first, second = (
        {tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (left.split(), right.split())
    )
    return len(first & second) / len(first | second)


@pytest.mark.parametrize("every", [200, 60, 25, 12])
def test_signatures_estimate_the_jaccard_similarity_of_five_token_shingles(every):
    original = text(1, 3000)
    other = changed(original, every)
    left, right = signatures([original, other])
    assert (left == right).mean() == pytest.approx(jaccard(original, other), abs=0.15)  # 3 sigma at 96 hashes


def test_a_signature_does_not_depend_on_company_white_space_or_block_size(monkeypatch):
    texts = [text(seed, 50) for seed in range(20)] + ["a", "", "(", text(3, 5000)]
    together = signatures(texts)
    alone = np.concatenate([signatures([one]) for one in texts if one])
    assert (together[[number for number, one in enumerate(texts) if one]] == alone).all()
    spaced = signatures([one.replace(" ", "\n   ") for one in texts])
    assert (together == spaced).all()
    monkeypatch.setattr(near_duplicates, "BLOCK", 4000)
    in_blocks = signatures(texts)
    assert (together[:-1] == in_blocks[:-1]).all()
    assert (together[-1] == in_blocks[-1]).mean() > 0.9  # a text in pieces loses the shingles across the cuts


def test_near_duplicates_are_found_and_strangers_are_not():
    originals = [text(seed) for seed in range(30)]
    copies = [changed(original, 40) for original in originals]
    pairs = {tuple(pair) for pair in near_pairs(signatures(originals + copies)).tolist()}
    assert pairs == {(number, number + 30) for number in range(30)}


def test_texts_without_any_token_resemble_nothing():
    assert near_pairs(signatures(["", " ", "\x00", "word"])).tolist() == []


def test_the_smallest_name_is_the_key_of_a_cluster(cache):
    documents = [Document("c", text(1)), Document("b", text(2)), Document("a", changed(text(1), 50))]
    assert cluster_keys(documents, cache_dir=cache) == ["a", "b", "a"]


def test_a_chain_of_near_duplicates_is_one_cluster(cache):
    chain = [text(1)]
    for step in range(6):
        words = chain[-1].split()
        words[step * 40 : step * 40 + 40] = text(100 + step, 40).split()
        chain.append(" ".join(words))
    documents = [Document(f"{number}.txt", one) for number, one in enumerate(chain)]
    assert jaccard(chain[0], chain[-1]) < 0.3
    assert set(cluster_keys(documents, cache_dir=cache)) == {"0.txt"}


def test_hundreds_of_equal_texts_are_one_cluster(cache):
    documents = [Document(f"{number:03}", text(1)) for number in range(400)]
    assert set(cluster_keys(documents, cache_dir=cache)) == {"000"}


def test_shares_of_clusters_are_as_asked_and_held_out_does_not_move():
    keys = [f"file{number}.py" for number in range(20_000)]
    parts = [split_of(key, 0.02, 0.03) for key in keys]
    assert parts.count("validation") / len(keys) == pytest.approx(0.02, abs=0.003)
    assert parts.count("held_out") / len(keys) == pytest.approx(0.03, abs=0.004)
    others = [split_of(key, 0.2, 0.03) for key in keys]
    assert [part == "held_out" for part in parts] == [part == "held_out" for part in others]


def test_a_single_document_trains(cache):
    for number in range(60):
        parts = split([Document(f"{number}", "text")], 0.3, 0.3, cache_dir=cache)
        assert {name: len(part) for name, part in parts.items()} == {
            "train": 1,
            "validation": 0,
            "held_out": 0,
        }


def test_the_nearly_equal_encodings_fall_on_one_side(library, cache):
    keys = cluster_keys(library, cache_dir=cache)
    encodings = {
        key for key, document in zip(keys, library, strict=True) if document.name.startswith("encodings/")
    }
    assert len(encodings) == 1
    parts = split(library, cache_dir=cache)
    sides = [name for name, part in parts.items() if any(d.name.startswith("encodings/") for d in part)]
    assert len(sides) == 1


def test_the_library_splits_into_three_parts_without_near_duplicates_across(library, cache):
    parts = split(library, cache_dir=cache)
    assert sum(map(len, parts.values())) == len(library)
    assert all(len(part) >= 10 for part in parts.values())
    order = [document for part in parts.values() for document in part][::3]  # a third costs a third
    side = [name for name, part in parts.items() for _ in part][::3]
    pairs = near_pairs(signatures([document.text for document in order]))
    assert len(pairs) > 10
    assert all(side[left] == side[right] for left, right in pairs.tolist())


def test_another_file_changes_a_split_only_through_its_cluster(cache):
    documents = [Document(f"{number}.txt", text(number, 80)) for number in range(200)]
    before = split(documents, 0.2, 0.2, cache_dir=cache)
    after = split(documents + [Document("new.txt", text(999))], 0.2, 0.2, cache_dir=cache)
    assert before == {name: [d for d in part if d.name != "new.txt"] for name, part in after.items()}


def test_a_split_is_the_same_in_every_process_and_version(cache):
    """Python's own hash differs from process to process; the network that ships was trained on this split."""
    texts = [" ".join(str((i // 2 + 5) * j * j % 97) for j in range(90 + i)) for i in range(8)]
    keys = cluster_keys([Document(str(i), text) for i, text in enumerate(texts)], cache_dir=cache)
    assert keys == ["0", "0", "2", "2", "4", "4", "6", "6"]
    assert [split_of(key, 0.3, 0.3) for key in keys[::2]] == ["validation", "train", "held_out", "train"]
    assert hashlib.sha256(signatures(texts).tobytes()).hexdigest().startswith("cb24b5d421624be2")


def test_prompts_are_cut_at_line_starts_one_per_document_and_always_the_same(library, cache):
    held_out = held_out_documents(cache_dir=cache)
    assert held_out == split(library, cache_dir=cache)["held_out"]
    tokenizer = train_tokenizer([document.text for document in library[:20]], 600, cache_dir=cache)
    first = prompts(held_out, 20, tokenizer, 32)
    assert first == prompts(held_out[::-1], 20, tokenizer, 32)
    assert first == prompts(held_out, 30, tokenizer, 32)[:20]
    assert first != prompts(held_out, 20, tokenizer, 32, seed=1)
    assert len({prompt.document for prompt in first}) == 20
    texts = {document.name: document.text for document in held_out}
    for prompt in first:
        assert len(prompt.token_ids) == 32
        assert prompt.token_ids[0] == tokenizer.bos_token_id
        assert "\n" + prompt.text.rstrip("\ufffd") in "\n" + texts[prompt.document]


def test_a_document_gives_a_second_prompt_only_when_all_gave_one(cache):
    documents = [Document(str(number), "\n".join(text(number, 500).split())) for number in range(3)]
    tokenizer = train_tokenizer([documents[0].text], 300, cache_dir=cache)
    found = prompts(documents, 8, tokenizer, 10)
    assert [sorted(p.document for p in found[i : i + 3]) for i in (0, 3)] == [["0", "1", "2"]] * 2
    assert len({(prompt.document, prompt.text) for prompt in found}) == 8


def test_too_little_held_out_text_is_refused(cache):
    tokenizer = train_tokenizer(["some text"], 300, cache_dir=cache)
    with pytest.raises(UserError, match=r"2 held-out documents give 0 prompts of 64 tokens, 5 are wanted"):
        prompts([Document("a", "short"), Document("b", "\n")], 5, tokenizer, 64)
