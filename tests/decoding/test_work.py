"""What a step costs besides the network: so many tensor operations, and no more however long the text is."""

import gc

import pytest
import torch
from drafters import drafter_for
from tiny import byte_tokenizer, chain_network, tiny_network
from torch.utils._python_dispatch import TorchDispatchMode

from decoding import Sampling, generate
from decoding.draft_length import FixedLength
from decoding.rows import Row
from mtp import Trunk

PROMPT = [5, 6, 7, 8, 9]


class Operations(TorchDispatchMode):
    """Counts tensor operations outside the trunk, by the step in which they come; growth of buffers apart."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.inside, self.steps = False, [0]
        forward, ask = Trunk.forward, FixedLength.ask

        def passed(trunk, *args, **kwargs):
            self.inside = True
            out = forward(trunk, *args, **kwargs)
            self.inside = False
            return out

        def asked(policy, rows):
            self.steps.append(0)
            return ask(policy, rows)

        monkeypatch.setattr(Trunk, "forward", passed)
        monkeypatch.setattr(FixedLength, "ask", asked)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.steps[-1] += not self.inside
        return function(*args, **(kwargs or {}))


def operations(monkeypatch, network, drafter, **options):
    """Of every step after the first few."""
    with monkeypatch.context() as patch, Operations(patch) as counted:
        generate(network, PROMPT, drafter=drafter_for(network, drafter), **options)
    return counted.steps[4:-1]


@pytest.mark.parametrize(
    ("drafter", "temperature", "most"),
    [("none", 0.0, 22), ("ngram", 0.0, 36), ("none", 1.0, 52), ("ngram", 1.0, 90)],
)
def test_a_step_takes_few_operations_besides_the_network_and_later_ones_take_no_more(
    monkeypatch, drafter, temperature, most
):
    """Before laws were left out where ids suffice, these were 49, 102, 185 and 212."""
    network = tiny_network()
    options = {"sampling": Sampling(temperature=temperature), "max_new_tokens": 120}
    counts = operations(monkeypatch, network, drafter, **options)
    usual = sorted(counts)[len(counts) // 2]
    assert usual <= most
    assert max(counts[-25:]) <= max(counts[:25])


def test_text_is_read_once_where_nobody_wants_it_earlier():
    tokenizer, calls = byte_tokenizer(), []
    network = chain_network([0, 1, *range(3, 258), 2], tokenizer=tokenizer)
    decode = tokenizer.decode
    network.tokenizer = Reader(tokenizer, lambda ids: calls.append(len(ids)), decode)
    texts = []
    for length in (20, 200):
        calls.clear()
        texts.append(generate(network, [2], max_new_tokens=length)[0].text)
        assert len(calls) <= 6
    assert texts[1].startswith(texts[0])


class Reader:
    """A tokenizer that tells of what it decodes."""

    def __init__(self, tokenizer, tell, decode):
        self.tokenizer, self.tell, self.read = tokenizer, tell, decode

    def decode(self, ids, **options):
        self.tell(ids)
        return self.read(ids, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_no_step_copies_the_text_of_a_row_without_processors(network, monkeypatch, verifier):
    monkeypatch.setattr(Row, "text", None)
    out = generate(
        network, PROMPT, drafter=drafter_for(network, "ngram"), verifier=verifier, max_new_tokens=20,
        sampling=Sampling(temperature=1.0),
    )[0]  # fmt: skip
    assert len(out.token_ids) == 20


def test_nothing_but_the_cache_grows():
    """Between two steps with as much room in the cache, no tensor is left behind."""
    network, sizes = tiny_network(), []

    def look(emitted):
        counts.append(0)
        if len(counts) in (140, 240):
            gc.collect()
            tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
            sizes.append(sum(one.numel() * one.element_size() for one in tensors))

    counts = []
    generate(network, PROMPT, max_new_tokens=245, observe=look)
    assert abs(sizes[1] - sizes[0]) < 2_000
