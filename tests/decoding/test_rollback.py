"""After any verdict a drafter is where a fresh start on the committed text would be.

No law test sees a drafter whose own cache went stale: its drafts are only worse. So the laws that it proposes
are compared, after none, some and all of a draft were rejected, with a fresh start and with one
teacher-forced pass.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from drafters import drafter_for

from decoding import generate
from decoding.cache import KVCache
from decoding.context import StepContext
from decoding.draft import Verdict
from decoding.draft_length import FixedLength
from decoding.generate import GREEDY, build_drafter, drafter_names
from decoding.loop import Verifier, decode
from decoding.prompts import Prompt
from decoding.rows import Row
from decoding.sampling import RowSampling
from decoding.stopping import Limits, Output

PROMPTS = [[5, 3, 9, 9, 1, 2], [4, 4, 4, 4, 8, 7, 6, 1, 4]]
FOUR = FixedLength(4)
# One random block fed its own output again and again magnifies rounding.
TOLERANCE = {"eagle": 5e-5}
DRAFTERS = [name for name in drafter_names() if name != "none"]
PATTERNS = {"none": [0] * 8, "some": [2, 1, 3, 0, 2, 4, 1, 2], "all": [4] * 8}


class Recording:
    """Passes calls on to a drafter and keeps, for every step, the drafted tokens and the laws behind them."""

    def __init__(self, drafter):
        self.drafter, self.taps, self.steps = drafter, drafter.taps, []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, root, num_draft_tokens, context):
        laws, raw = [], context.law

        def law(logits, path):
            laws.append(logits.softmax(-1))
            return raw(logits, path)

        context.law = law
        draft = self.drafter.propose(root, num_draft_tokens, context)
        self.steps.append((root.clone(), draft.tokens, laws))
        return draft


def scripted(pattern, length):
    """A verdict that accepts a given number of nodes, whatever was drafted, with arbitrary next tokens."""
    counts = iter(pattern)

    def verify(p, draft, u):
        accepted = torch.zeros(p.shape[:2], dtype=torch.bool)
        used = min(next(counts), draft.tokens.shape[1])
        accepted[:, : used + 1] = True
        return Verdict(accepted, (draft.tokens.sum(1) * 7 + torch.arange(len(p)) + used) % length)

    return verify


def run(network, name, pattern, length=FOUR):
    """Decode with scripted verdicts; returns the recorder and, per row, the text as it stood before every
    step."""
    recorder = Recording(drafter_for(network, name))
    rows = [
        Row(i, Prompt(prompt, None), GREEDY, i, Output(prompt, Limits(60), None))
        for i, prompt in enumerate(PROMPTS)
    ]
    texts = []
    original = recorder.propose

    def propose(root, count, context):
        if len(recorder.steps) == len(pattern):
            raise StopIteration
        texts.append([row.prompt.ids + row.output.token_ids for row in rows])
        return original(root, count, context)

    recorder.propose = propose
    with pytest.raises(StopIteration):
        decode(network, rows, recorder, length, Verifier(scripted(pattern, network.trunk.vocab_size)))
    return recorder.steps, texts


def fresh(network, name, text, count=4):
    """What a new drafter proposes when `text` is its prompt."""
    drafter = Recording(drafter_for(network, name))
    cache = KVCache(1, network.trunk.device)
    with torch.inference_mode():
        drafter.reset(1, cache)
        tokens = torch.tensor([text[:-1]])
        window = cache.open(tokens.shape[1])
        out = network.trunk(
            tokens, positions=window.positions, mask=window.mask, cache=cache, taps=drafter.taps
        )
        keep = torch.ones_like(tokens, dtype=torch.bool)
        cache.commit(keep)
        drafter.extend(tokens, out.states, keep)
        sampling = RowSampling.stack([GREEDY], network.trunk.vocab_size, network.trunk.device)
        context = StepContext(sampling, torch.tensor([0]), [20], 0, count)
        drafter.propose(torch.tensor([text[-1]]), count, context)
    return drafter.steps[0]


def compared(name, laws, expected):
    """Laws of all rows beside those of a fresh start; a hybrid has none where it looks up, alone or not."""
    return zip(laws, expected, strict=name != "hybrid" or bool(expected))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_next_proposal_equals_that_of_a_fresh_start(network, name, pattern):
    steps, texts = run(network, name, PATTERNS[pattern])
    assert len(steps) == len(PATTERNS[pattern])
    for (_, drafted, laws), rows in zip(steps, texts, strict=True):
        for r, text in enumerate(rows):
            _, tokens, expected = fresh(network, name, text)
            assert drafted[r].tolist()[: tokens.shape[1]] == tokens[0].tolist()
            for law, other in compared(name, laws, expected):
                torch.testing.assert_close(law[r], other[0], atol=TOLERANCE.get(name, 1e-5), rtol=0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_was_not_asked_for_a_while_has_missed_nothing(network, name):
    lengths = (4, 1, 0, 2, 4, 3, 0, 4)
    asked = iter(lengths)
    varying = SimpleNamespace(most=4, ask=lambda rows: [next(asked)] * len(rows), learns=False)
    steps, texts = run(network, name, PATTERNS["some"], varying)
    for (_, drafted, laws), rows, count in zip(steps, texts, lengths, strict=True):
        for r, text in enumerate(rows):
            _, tokens, expected = fresh(network, name, text, count)
            assert drafted[r].tolist()[: tokens.shape[1]] == tokens[0].tolist()
            for law, other in compared(name, laws, expected):
                torch.testing.assert_close(law[r], other[0], atol=TOLERANCE.get(name, 1e-5), rtol=0)


@torch.no_grad()
def teacher_forced(network, name, text, drafted):
    """Laws of depths 1 ... 4 from one pass over committed text, root and drafted tokens."""
    trunk, head = network.trunk, network.heads[name]
    row = torch.tensor([text + drafted])
    readouts = list(head.readouts(trunk, row, trunk(row, taps=head.taps).states))
    if name == "early_exit":
        exit_ = readouts[head.exit_layer - 1]
        places = [(exit_.hidden, len(text) - 1 + depth) for depth in range(len(drafted))]
    else:
        places = [(readout.hidden, len(text) - 2) for readout in readouts]
    return [trunk.lm_head(hidden[0, at]).softmax(-1) for hidden, at in places]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["sequential", "parallel", "early_exit"])
def test_depth_k_proposes_what_one_teacher_forced_pass_says(network, name, pattern):
    steps, texts = run(network, name, PATTERNS[pattern])
    for (_, drafted, laws), rows in zip(steps, texts, strict=True):
        assert len(laws) == 4
        for r, text in enumerate(rows):
            for law, expected in zip(
                laws, teacher_forced(network, name, text, drafted[r].tolist()), strict=True
            ):
                torch.testing.assert_close(law[r], expected, atol=1e-5, rtol=0)


def test_cache_holds_the_committed_tokens_after_every_step(network):
    """Between steps the trunk's cache has everything but the root."""
    seen = []
    drafter = build_drafter(network, "early_exit")
    original = drafter.propose

    def propose(root, count, context):
        seen.append(list(drafter.cache.lengths))
        return original(root, count, context)

    drafter.propose = propose
    out = generate(network, PROMPTS[0], drafter=drafter, num_draft_tokens=8, max_new_tokens=30)[0]
    assert seen[0] == [len(PROMPTS[0]) - 1]
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))
    assert seen[-1][0] <= len(PROMPTS[0]) + len(out.token_ids) - 1
