"""Long texts: all that a step does besides the network takes no longer than before, and keeps no more.

The network is a table here: attention does grow with the text, and leaves cold caches behind.
"""

import time
from pathlib import Path
from statistics import median

import pytest
import torch
from drafters import drafter_for
from tiny import tiny_network

from decoding import generate
from decoding.draft_length import FixedLength
from mtp import Trunk
from mtp.trunk import TrunkOutput

TOKENS, WINDOW = 4096, 200  # tokens written; steps of which a median is taken
SPARE = 8 * 2**20  # bytes: lists of tokens, and what the allocator keeps


class Clock:
    """Seconds of every step, and the memory held when it begins."""

    def __init__(self, monkeypatch):
        self.seconds, self.held, self.began = [], [], time.perf_counter()
        following = torch.eye(64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))]

        def asked(policy, rows):
            self.seconds.append(time.perf_counter() - self.began)
            self.held.append(resident())
            self.began = time.perf_counter()
            return ask(policy, rows)

        def passed(trunk, tokens, **_):
            return TrunkOutput({}, following[tokens])

        ask = FixedLength.ask
        monkeypatch.setattr(Trunk, "forward", passed)
        monkeypatch.setattr(FixedLength, "ask", asked)


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is read from /proc")
@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_a_step_late_in_a_text_takes_what_an_early_one_takes(drafter, monkeypatch, capsys):
    network = tiny_network(context=2 * TOKENS)
    clock = Clock(monkeypatch)
    built = drafter_for(network, drafter)
    done = generate(network, [5, 6, 7, 8], drafter=built, max_new_tokens=TOKENS, eos_token_ids=())[0]
    assert len(done.token_ids) == TOKENS
    early, late = median(clock.seconds[WINDOW : 2 * WINDOW]), median(clock.seconds[-WINDOW:])
    grown = clock.held[-1] - clock.held[WINDOW]
    with capsys.disabled():
        print(f"\n{drafter}: {late / early:.2f} times as long, {grown / 2**20:.1f} MB more", end="")
    assert late < 1.2 * early
    assert grown < SPARE
