"""Lookup where the text was like this before, else a head: row by row, with honest laws and a head that keeps
up."""

import pytest
import torch
from drafters import drafter_for, tiny_draft
from laws import check_law
from tiny import tiny_network

from decoding import Draft, Sampling, generate
from decoding.draft import chain
from decoding.drafters.hybrid import mixed
from decoding.generate import build_drafter
from mtp import UserError

REPEATING, FRESH = [7, 8, 9, 7, 8, 9, 7, 8], [1, 2, 3, 4]
PROMPTS = [FRESH, REPEATING, [5], [9, 8, 7, 1, 2, 3, 9, 8]]
HEADS = ["sequential", "parallel", "early_exit", "draft_model"]


def ids(completions):
    return [completion.token_ids for completion in completions]


def hybrid(network, head="sequential", lookup="suffix", **options):
    needed = {"model": tiny_draft(network)} if head == "draft_model" else None
    options = {"min_match": 2, "head_options": needed} | options
    return build_drafter(network, "hybrid", head=head, lookup=lookup, **options)


class Watching:
    """Keeps every draft, and what lookup and head said at that step (None: the head was not asked)."""

    def __init__(self, drafter):
        self.drafter, self.taps, self.steps = drafter, drafter.taps, []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, root, num_draft_tokens, context):
        said = {}
        for part in ("lookup", "head"):
            inner = getattr(self.drafter, part)
            said[part] = inner.propose
            inner.propose = lambda *args, part=part: said.update({part: said[part](*args)}) or said[part]
        draft = self.drafter.propose(root, num_draft_tokens, context)
        for part in ("lookup", "head"):
            del getattr(self.drafter, part).propose
        head = said["head"] if isinstance(said["head"], Draft) else None
        self.steps.append((draft, said["lookup"], head, list(context.room)))
        return draft


@pytest.mark.parametrize("lookup", ["suffix", "ngram"])
@pytest.mark.parametrize("head", HEADS)
def test_rows_of_a_batch_choose_for_themselves(network, head, lookup):
    watching = Watching(hybrid(network, head, lookup))
    out = generate(network, PROMPTS, drafter=watching, max_new_tokens=30)
    assert ids(out) == ids(generate(network, PROMPTS, max_new_tokens=30))
    kinds = set()
    for draft, found, drafted, room in watching.steps:
        for row, left in enumerate(room):
            looked_up = bool((found.parents[row] >= 0).any())
            source = found if looked_up else drafted
            if source is not None and left > 0:
                kinds.add((looked_up, drafted is not None))
                used = source.parents[row] >= 0
                assert draft.tokens[row, : len(used)][used].tolist() == source.tokens[row][used].tolist()
                assert (draft.parents[row] >= 0).sum() == used.sum()
    assert kinds >= {(False, True), (True, True)}


def test_the_head_is_not_asked_where_every_row_looks_up(network):
    watching = Watching(hybrid(network))
    generate(network, REPEATING, drafter=watching, max_new_tokens=10)
    assert watching.steps[0][2] is None
    assert watching.steps[0][0].tokens[0].tolist() == watching.steps[0][1].tokens[0].tolist()


@pytest.mark.parametrize("head", HEADS)
def test_a_seed_repeats_in_any_company(network, head):
    options = {"drafter": hybrid(network, head), "sampling": Sampling(temperature=0.5), "max_new_tokens": 15}
    options["drafter"].lookup.half = 0  # earlier outputs would change what a second call looks up
    together = generate(network, PROMPTS, seed=[1, 7, 2, 5], **options)
    for prompt, seed, row in zip(PROMPTS, [1, 7, 2, 5], together, strict=True):
        assert generate(network, prompt, seed=seed, **options)[0].token_ids == row.token_ids


def test_mixed_rows_keep_the_law():
    network = tiny_network(seed=2, vocab_size=6, layers=2)
    watching = Watching(hybrid(network, "early_exit", "ngram", min_match=1))
    check_law(network, [1, 2, 3], drafter=watching, num_draft_tokens=2, verifier="block")
    mixes = [
        found.parents[:, 0] >= 0
        for _, found, drafted, _ in watching.steps
        if drafted and found.tokens.numel()
    ]
    assert any(0.1 < looked_up.double().mean() < 0.9 for looked_up in mixes)


def test_mixing_takes_lookup_rows_as_point_masses_and_leaves_states_behind():
    found = chain([torch.tensor([5, 0]), torch.tensor([6, 0]), torch.tensor([7, 0])], [None] * 3, [3, 0])
    q = torch.tensor([[[0.1] * 10], [[0.0] * 9 + [1.0]]])
    drafted = Draft(torch.tensor([[4], [9]]), torch.tensor([[0], [0]]), q, 2, torch.zeros(2, 2, 8))
    draft = mixed(found, drafted, [True, False])
    assert draft.tokens.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert draft.parents.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert draft.q[0].argmax(-1).tolist() == [5, 6, 7]
    assert torch.equal(draft.q[1, 0], q[1, 0])
    assert draft.q.sum(-1).tolist() == [[1.0] * 3] * 2
    assert (draft.exit_layer, draft.states) == (0, None)


def test_mixing_widens_lookup_rows_to_a_tree_of_the_head():
    found = chain([torch.tensor([5, 0])], [None], [1, 0])
    drafted = Draft(
        torch.tensor([[1, 2, 3]] * 2), torch.tensor([[0, 0, 1]] * 2), None, 2, torch.zeros(2, 4, 8)
    )
    draft = mixed(found, drafted, [True, False])
    assert (draft.q, draft.exit_layer, draft.states) == (None, 0, None)
    assert draft.tokens.tolist() == [[5, 0, 0], [1, 2, 3]]
    assert draft.parents.tolist() == [[0, -1, -1], [0, 0, 1]]


def test_trees_and_lookup_share_a_batch(network):
    drafter = hybrid(network, "parallel", head_options={"widths": [2, 1]})
    out = generate(network, PROMPTS, drafter=drafter, max_new_tokens=30)
    assert ids(out) == ids(generate(network, PROMPTS, max_new_tokens=30))


def test_options_reach_lookup_and_head(network):
    drafter = hybrid(network, lookup_options={"factor": 3.0, "depth": 9}, min_match=5)
    assert (drafter.lookup.rule.factor, drafter.lookup.depth, drafter.lookup.rule.min_match) == (3.0, 9, 5)
    drafter = hybrid(network, "early_exit", "ngram", min_match=6, head_options={"exit_layer": 1})
    assert (drafter.lookup.min_ngram, drafter.lookup.max_ngram, drafter.head.exit_layer) == (6, 6, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lookup": "sequential"}, "drafter.lookup='sequential' is not one of ngram, suffix"),
        ({"head": "hybrid"}, "drafter.head='hybrid' is not one of"),
        ({"head": "none"}, "drafter.head='none' is not one of"),
        ({"head": "draft_model"}, "drafter.head_options.model is missing"),
        ({"min_match": 0}, "min_match=0"),
    ],
)
def test_a_bad_option_is_named(network, options, named):
    with pytest.raises(UserError, match=named):
        build_drafter(network, "hybrid", **options)


def test_drafter_for_tests_looks_up_and_drafts(network):
    watching = Watching(drafter_for(network, "hybrid"))
    generate(network, [FRESH, REPEATING], drafter=watching, max_new_tokens=5)
    assert [bool((parents >= 0).any()) for parents in watching.steps[0][1].parents] == [False, True]
