"""Where nothing is left to chance, verdicts come from comparing ids: the very ones that laws give."""

import doctest

import pytest
import torch
from drafters import drafter_for
from hypothesis import given, settings
from hypothesis import strategies as st

import decoding.context
from decoding import Draft, Sampling, generate, judge, tree
from decoding.context import StepContext
from decoding.generate import build_drafter
from decoding.loop import VERIFIERS
from decoding.sampling import RowSampling
from decoding.tree import is_chain
from mtp.trunk import TrunkOutput

V = 5
PROMPTS = [[1, 2, 3, 4], [5], [7, 8, 9, 7, 8, 9, 7, 8]]
TREE = {"widths": [3, 2, 1]}


@pytest.mark.parametrize("module", [judge, tree])
def test_the_documented_examples_hold(module):
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


@st.composite
def steps(draw):
    """Scores with ties, and drafts of any shape: twins among siblings, unused nodes, rows without room."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    only_chains = draw(st.booleans())
    parents = []
    for _ in range(rows):
        if only_chains:
            used = draw(st.integers(0, nodes))
            parents.append([n if n < used else -1 for n in range(nodes)])
            continue
        line = [draw(st.integers(-1, n)) for n in range(nodes)]
        for n, parent in enumerate(line):  # an unused node has no children
            line[n] = -1 if parent > 0 and line[parent - 1] < 0 else parent
        parents.append(line)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randint(0, 3, (rows, nodes + 1, V), generator=generator).float()
    tokens = torch.randint(0, V, (rows, nodes), generator=generator)
    tokens = torch.where(
        torch.rand(rows, nodes, generator=generator) < 0.6, right_tokens(logits, parents, nodes), tokens
    )
    kind = draw(st.sampled_from(["sure", "one-hot", "spread"]))
    q = torch.rand(rows, nodes, V, generator=generator).softmax(-1)
    if kind == "one-hot":
        q = torch.nn.functional.one_hot(tokens, V).float()
    tensor = torch.tensor(parents, dtype=torch.long).reshape(rows, nodes)
    return logits, Draft(tokens, tensor, None if kind == "sure" else q)


def right_tokens(logits, parents, nodes):
    """[B, N] what the target says after every node's parent."""
    above = torch.tensor(parents, dtype=torch.long).reshape(len(logits), nodes).clamp(min=0)
    return logits.argmax(-1).gather(1, above)


def context_of(rows, samplings=None, *, coupled=False, rules=(), texts=None):
    samplings = samplings or [Sampling()] * rows
    return StepContext(
        RowSampling.stack(samplings, V, torch.device("cpu")), torch.arange(rows), [9] * rows, 3, 6,
        texts=texts or [[1]] * rows, rules=rules, coupled=coupled,
    )  # fmt: skip


def agree(rule, context, logits, draft):
    """The verdict from ids and the one from laws are the same."""
    parents = draft.parents.tolist()
    ids, laws = (
        judge.judge(rule, context, TrunkOutput({}, logits), draft, parents=parents, laws=laws)
        for laws in (False, True)
    )
    assert ids.seen is None
    assert laws.seen is not None
    assert (ids.paths, ids.tokens) == (laws.paths, laws.tokens)
    assert torch.equal(ids.next_token, laws.next_token)
    keep = ids.keep(draft.tokens.shape[1] + 1)
    assert torch.equal(keep, laws.seen[1].accepted)
    assert keep[:, 0].all()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(steps(), st.sampled_from(sorted(VERIFIERS)))
def test_greedy_verdicts_from_ids_are_those_from_laws(step, name):
    logits, draft = step
    rule = VERIFIERS[name]
    if rule.trees or is_chain(draft.parents):
        agree(rule, context_of(len(logits), coupled=rule.coupled), logits, draft)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(steps())
def test_coupled_verdicts_from_ids_are_those_from_laws(step):
    logits, draft = step
    samplings = [Sampling(temperature=1.0), Sampling(), Sampling(temperature=0.7, top_k=3)][: len(logits)]
    agree(VERIFIERS["coupled"], context_of(len(logits), samplings, coupled=True), logits, draft)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_equal_best_scores_go_to_the_lowest_id_in_every_dtype(dtype):
    logits = torch.tensor([[[0, 2, 2, 1, 2], [3, 3, 3, 3, 3]]], dtype=dtype)
    draft = Draft(torch.tensor([[1]]), torch.tensor([[0]]))
    context = context_of(1)
    assert context.choices(logits, draft).tolist() == [[1, 0]]
    agree(VERIFIERS["token"], context, logits, draft)


def test_a_rows_own_processors_are_heard_before_ids_are_compared():
    def ban(ids, scores):  # what the text ends with must not come again
        return scores.index_fill(1, ids[0, -1:], -torch.inf)

    logits = torch.tensor([[[0.0, 1, 2, 3, 4]] * 3] * 2)
    draft = Draft(torch.tensor([[4, 3], [4, 4]]), torch.tensor([[0, 1], [0, 1]]))
    context = context_of(2, rules=[[ban], []], texts=[[1], []])
    assert context.choices(logits, draft).tolist() == [[4, 3, 4], [4, 4, 4]]
    agree(VERIFIERS["token"], context, logits, draft)


def ignore(*_):
    pass


@pytest.mark.parametrize(
    ("drafter", "options", "verifiers"),
    [
        ("sequential", {}, list(VERIFIERS)),
        ("ngram", {}, ["token", "coupled"]),
        ("parallel", TREE, ["token", "traversal", "coupled", "typical"]),
    ],
)
def test_decoding_is_the_same_whether_or_not_somebody_wants_to_see_the_laws(
    network, drafter, options, verifiers
):
    """A trace is told laws; without one they are not computed for greedy and coupled rows."""
    for verifier in verifiers:
        warm = Sampling(temperature=1.0) if verifier == "coupled" else Sampling()
        settings_ = {"verifier": verifier, "sampling": [warm, Sampling(), warm], "max_new_tokens": 14}
        unseen, seen = (
            generate(
                network, PROMPTS, drafter=build_drafter(network, drafter, **options), trace=trace, **settings_
            )
            for trace in (None, ignore)
        )
        assert [row.token_ids for row in unseen] == [row.token_ids for row in seen]
        assert [row.acceptance for row in unseen] == [row.acceptance for row in seen]


@pytest.mark.parametrize("num_draft_tokens", [4, "auto"])
@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
def test_greedy_decoding_computes_no_law_of_the_target(network, monkeypatch, verifier, num_draft_tokens):
    def refuse(*_):
        raise AssertionError("a law was computed")

    monkeypatch.setattr(decoding.context.StepContext, "laws", refuse)
    monkeypatch.setattr(decoding.context.StepContext, "uniforms", refuse)
    out = generate(
        network, PROMPTS, drafter=drafter_for(network, "ngram"), num_draft_tokens=num_draft_tokens,
        verifier=verifier, max_new_tokens=12,
    )  # fmt: skip
    assert [len(row.token_ids) for row in out] == [12] * 3
