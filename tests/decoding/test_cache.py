"""Whatever was cached, dropped or moved, a token sees exactly its own text, as full forward passes show."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_trunk
from transformers import AutoConfig, AutoModelForCausalLM

from decoding.cache import KVCache
from mtp import Trunk
from mtp.trunk import ARCHITECTURES

TRUNK = tiny_trunk(layers=2)
TOKEN = st.integers(0, TRUNK.vocab_size - 1)


@torch.no_grad()
def fed(trunk, cache: KVCache, rows: list[list[int]], **window) -> torch.Tensor:
    """Logits [B, W, V] of tokens [B][W] run in a newly opened window."""
    opened = cache.open(len(rows[0]), **window)
    return trunk(torch.tensor(rows), positions=opened.positions, mask=opened.mask, cache=cache).logits


def filled(texts: list[list[int]], capacity: int = 256) -> KVCache:
    """A cache with these committed texts, run together as the loop's prefill does it."""
    cache = KVCache(len(texts), torch.device("cpu"), capacity)
    width = max(map(len, texts))
    if width:
        fed(TRUNK, cache, [text + [0] * (width - len(text)) for text in texts])
        cache.commit(torch.arange(width) < torch.tensor([len(text) for text in texts])[:, None])
    return cache


@torch.no_grad()
def after(text: list[int]) -> torch.Tensor:
    """Logits [V] after a text, from one full forward pass without a cache."""
    return TRUNK(torch.tensor([text])).logits[0, -1]


def agree(logits: torch.Tensor, text: list[int]) -> None:
    torch.testing.assert_close(logits, after(text), atol=1e-5, rtol=0)


def path(parents: list[int], node: int) -> list[int]:
    """The nodes from the root down to this one."""
    return [0] if node == 0 else [*path(parents, parents[node - 1]), node]


@pytest.mark.parametrize("prefix", [0, 1, 7])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
@torch.no_grad()
def test_a_chunk_after_a_cached_prefix_is_read_as_in_one_full_pass(model_type, prefix):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    trunk = Trunk(AutoModelForCausalLM.from_config(config).eval())
    text = [5, 9, 1, 1, 60, 2, 33, 7, 8, 4, 12][: prefix + 4]
    cache = KVCache(1, trunk.device)
    if prefix:
        fed(trunk, cache, [text[:prefix]])
        cache.commit(torch.ones(1, prefix, dtype=torch.bool))
    chunk = fed(trunk, cache, [text[prefix:]])
    whole = trunk.model(torch.tensor([text])).logits[:, prefix:]
    torch.testing.assert_close(chunk, whole, atol=1e-5, rtol=0)


@st.composite
def trees(draw):
    """Rows of different lengths, each with its own draft tree and the node up to which that is accepted."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    texts = draw(st.lists(st.lists(TOKEN, max_size=5), min_size=rows, max_size=rows))
    parents = [[draw(st.integers(-1, n)) for n in range(nodes)] for _ in range(rows)]
    for line in parents:  # an unused node has no children
        for n, parent in enumerate(line):
            line[n] = -1 if parent > 0 and line[parent - 1] < 0 else parent
    tokens = draw(
        st.lists(st.lists(TOKEN, min_size=nodes + 1, max_size=nodes + 1), min_size=rows, max_size=rows)
    )
    used = [[0] + [n for n, parent in enumerate(line, start=1) if parent >= 0] for line in parents]
    return texts, parents, tokens, [draw(st.sampled_from(line)) for line in used]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trees())
def test_a_tree_is_read_as_every_path_by_itself_and_an_accepted_path_as_if_it_had_been_alone(case):
    texts, parents, tokens, accepted = case
    cache = filled(texts, capacity=4)
    logits = fed(TRUNK, cache, tokens, parents=torch.tensor(parents).reshape(len(texts), -1))
    for row, text in enumerate(texts):
        for node in range(len(tokens[row])):
            if node == 0 or parents[row][node - 1] >= 0:
                agree(logits[row, node], text + [tokens[row][n] for n in path(parents[row], node)])
    keep = torch.zeros(len(texts), len(tokens[0]), dtype=torch.bool)
    for row, node in enumerate(accepted):
        keep[row, path(parents[row], node)] = True
        texts[row] = texts[row] + [tokens[row][n] for n in path(parents[row], node)]
    cache.commit(keep)
    assert cache.lengths == [len(text) for text in texts]
    chunk = [[11, 12, 13]] * len(texts)
    later = fed(TRUNK, cache, chunk)
    for row, text in enumerate(texts):
        agree(later[row, 2], text + chunk[row])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_what_was_truncated_leaves_no_trace(texts, data):
    cache = filled(texts)
    kept = [data.draw(st.integers(0, len(text)), label="kept") for text in texts]
    cache.truncate(kept)
    assert cache.lengths == kept
    chunk = [[1, 2]] * len(texts)
    logits = fed(TRUNK, cache, chunk)
    for row, text in enumerate(texts):
        agree(logits[row, 0], text[: kept[row]] + [1])
        agree(logits[row, 1], text[: kept[row]] + [1, 2])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.lists(TOKEN, max_size=6), min_size=1, max_size=4), st.data())
def test_the_rows_that_go_on_are_read_as_before(texts, data):
    cache = filled(texts)
    chosen = data.draw(st.lists(st.sampled_from(range(len(texts))), min_size=1, unique=True), label="rows")
    cache.select(torch.tensor(chosen))
    logits = fed(TRUNK, cache, [[3, 4]] * len(chosen))
    for place, row in enumerate(chosen):
        agree(logits[place, 1], texts[row] + [3, 4])


def test_scratch_that_is_never_committed_leaves_no_trace():
    cache = filled([[5, 6, 7]])
    for rejected in ([1, 2, 3, 4], [9, 9]):
        fed(TRUNK, cache, [rejected])
    assert cache.lengths == [3]
    agree(fed(TRUNK, cache, [[8]])[0, 0], [5, 6, 7, 8])


@pytest.mark.parametrize("texts", [[[5, 6, 7]], [[5, 6, 7], [1]]])
def test_nodes_run_one_by_one_are_read_as_nodes_run_together(texts):
    cache = filled(texts)
    for node, token in enumerate([8, 9, 10]):
        logits = fed(TRUNK, cache, [[token]] * len(texts), first=node)
        for row, text in enumerate(texts):
            agree(logits[row, 0], text + [8, 9, 10][: node + 1])
    assert cache.lengths == [len(text) for text in texts]


def test_rows_may_commit_different_numbers_of_nodes():
    cache = filled([[5], [6]])
    fed(TRUNK, cache, [[1, 2, 3], [1, 2, 3]])
    cache.commit(torch.tensor([[True, True, True], [True, False, False]]))
    assert cache.lengths == [4, 2]
    logits = fed(TRUNK, cache, [[7], [7]])
    agree(logits[0, 0], [5, 1, 2, 3, 7])
    agree(logits[1, 0], [6, 1, 7])


def test_the_example_of_the_docstring_holds():
    cache = KVCache(1, torch.device("cpu"))
    cache.lengths = [10]
    chain = cache.open(3)
    assert chain.positions.tolist() == [[10, 11, 12]]
    assert chain.mask[0, 0, 1].tolist() == [True] * 12 + [False]
    tree = cache.open(3, parents=torch.tensor([[0, 0]]))
    assert tree.positions.tolist() == [[10, 11, 11]]
    assert tree.mask[0, 0, 2].tolist() == [True] * 11 + [False, True]


def test_room_grows_without_losing_what_is_there():
    cache = filled([[5, 6]], capacity=2)
    assert cache.capacity == 2
    agree(fed(TRUNK, cache, [[1, 2, 3, 4]])[0, 3], [5, 6, 1, 2, 3, 4])
    cache.commit(torch.ones(1, 4, dtype=torch.bool))
    agree(fed(TRUNK, cache, [[7] * 9])[0, 8], [5, 6, 1, 2, 3, 4] + [7] * 9)
    assert cache.capacity >= 15


def test_truncating_to_nothing_keeps_nothing():
    cache = filled([[5, 6, 7]])
    cache.truncate([0])
    assert cache.lengths == [0]
    agree(fed(TRUNK, cache, [[9]])[0, 0], [9])


@pytest.mark.parametrize("lengths", [[4], [-1]])
def test_truncating_to_more_than_there_is_or_less_than_nothing_is_an_error(lengths):
    with pytest.raises(ValueError, match="cannot truncate"):
        filled([[5, 6, 7]]).truncate(lengths)


@pytest.mark.parametrize("texts", [[[5, 6, 7]], [[5, 6], [7, 8]], [[5, 6, 7], [1]]])
def test_a_window_opened_without_the_mask_of_its_chain_is_read_as_with_it(texts):
    """Layers that cannot do without one are given it by the trunk."""
    cache = filled(texts)
    chunk = [[1, 2, 3]] * len(texts)
    masked, left_out = fed(TRUNK, cache, chunk), fed(TRUNK, cache, chunk, causal=True)
    assert torch.equal(masked, left_out)
    assert (cache.open(3, causal=True).mask is None) == (len(set(map(len, texts))) == 1)
