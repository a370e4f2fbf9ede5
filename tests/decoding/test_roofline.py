"""What memory allows, and what waits for the device."""

import torch
from tiny import tiny_network, tiny_trunk

from decoding.contest import maker
from decoding.roofline import bandwidth, cache_bytes, peak_bytes, roofline, weight_bytes
from decoding.syncs import waits
from mtp import Network


def test_weights_are_counted_by_the_config_so_packed_ones_too():
    network = tiny_network()
    parameters = sum(parameter.numel() for parameter in network.trunk.parameters())
    every, read = weight_bytes(network)
    assert every == 4 * parameters
    assert read == every - 4 * 64 * 32  # a row of the embedding is looked up
    network.pack()
    assert weight_bytes(network) == (every, read)


def test_a_tied_embedding_is_read_as_the_output_head():
    every, read = weight_bytes(Network(tiny_trunk(tie_word_embeddings=True)))
    assert every == read


def test_half_precision_halves_weights_and_cache():
    network, half = tiny_network(), tiny_network().to(torch.bfloat16)
    assert weight_bytes(half)[0] * 2 == weight_bytes(network)[0]
    assert cache_bytes(half) * 2 == cache_bytes(network)


def test_the_cache_grows_by_the_keys_and_values_of_a_token(network):
    assert cache_bytes(network) == 2 * 4 * 2 * 8 * 4  # keys and values, layers, heads, numbers, bytes


def test_the_limit_is_bandwidth_by_what_a_step_reads(network, monkeypatch):
    monkeypatch.setattr("decoding.roofline.bandwidth", lambda device: 1e9)
    found = roofline(network)
    assert found["tokens_per_second"] == 1e9 / found["weight_bytes_read"]


def test_bandwidth_and_memory_are_those_of_a_machine():
    assert 1e8 < bandwidth(torch.device("cpu"), array_bytes=2**24) < 1e13
    found = peak_bytes(torch.device("cpu"))
    assert 2**26 < found["process"] < 2**40
    assert found["gpu"] is None


class Reading:
    """A drafter that reads some numbers, one by one, in every step."""

    def __init__(self, drafter, reads):
        self.drafter, self.reads, self.taps = drafter, reads, drafter.taps

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, root, num_draft_tokens, context):
        for _ in range(self.reads):
            root.sum().item()
        return self.drafter.propose(root, num_draft_tokens, context)


def test_every_read_of_a_number_is_counted_by_step(network):
    build = maker(network, "sequential", {})
    options = {"max_new_tokens": 8, "num_draft_tokens": 2}
    before = waits(network, build, [1, 2, 3], **options)
    after = waits(network, lambda: Reading(build(), 3), [1, 2, 3], **options)
    assert after["steps"] == before["steps"] > 0
    assert after["per_step"] == before["per_step"] + 3
