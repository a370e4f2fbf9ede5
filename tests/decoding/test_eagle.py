"""Every node that EAGLE's head drafts is what its block says along that node's path, after any verdict."""

import pytest
import torch
from laws import check_law, table_network
from trees import tree_steps

from decoding import Sampling, generate
from decoding.generate import build_drafter
from decoding.ranking import Candidates
from decoding.tree import depths
from mtp import UserError

PROMPTS = [[5, 3, 9, 9, 1, 2], [4, 4, 4, 4, 8, 7, 6, 1, 4]]
KINDS = {"chain": {}, "fixed": {"widths": [2, 3]}, "ranked": {"tree_nodes": 8, "top_k": 3}}


@torch.inference_mode()
def said(network, text, path):
    """Log-probabilities [V] after the root and these drafted tokens: the block run anew on the whole line."""
    trunk, head = network.trunk, network.heads["eagle"]
    true = trunk(torch.tensor([text]), taps=head.taps, logits=False).states[trunk.num_layers][
        :, : len(text) - 1
    ]
    features = true
    for count in range(len(path) + 1):
        line = torch.tensor([(text + path)[1 : len(text) + count]])
        rotary = trunk.rotary(features, torch.arange(features.shape[1])[None])
        foretold = head(trunk.embed(line), features, rotary)
        features = torch.cat([features, foretold[:, -1:]], dim=1)
    return trunk.lm_head(features[0, -1]).double().log_softmax(-1)


def ranked_tree(network, text, *, nodes, top_k, depth):
    """EAGLE-2's tree by its definition: {path: log-probability}."""
    beam, found = {(): 0.0}, {}
    for _ in range(depth):
        level = {}
        for path, score in beam.items():
            best = said(network, text, list(path)).topk(top_k)
            level |= {
                (*path, t): score + v
                for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            }
        found |= level
        beam = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(found.items(), key=lambda item: -item[1])[:nodes])


def drafted_paths(draft, row):
    paths = [()]
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


@pytest.mark.parametrize("kind", ["chain", "fixed"])
def test_a_nodes_children_are_the_best_tokens_that_the_block_foretells_on_its_path(network, kind):
    widths = KINDS[kind].get("widths", [])
    for texts, draft in tree_steps(network, build_drafter(network, "eagle", **KINDS[kind]), PROMPTS):
        for row, text in enumerate(texts):
            paths, parents = drafted_paths(draft, row), draft.parents[row].tolist()
            for node, path in enumerate(paths):
                children = [n + 1 for n, parent in enumerate(parents) if parent == node]
                width = (widths + [1] * 3)[len(path)] if len(path) < 3 else 0
                assert len(children) == width
                best = said(network, text, list(path)).topk(width).indices.tolist()
                assert [paths[child][-1] for child in children] == best


def test_a_ranked_tree_has_the_most_probable_nodes(network):
    for texts, draft in tree_steps(network, build_drafter(network, "eagle", **KINDS["ranked"]), PROMPTS):
        for row, text in enumerate(texts):
            expected = ranked_tree(network, text, nodes=8, top_k=3, depth=3)
            assert set(drafted_paths(draft, row)[1:]) == set(expected)


def test_a_ranked_tree_is_as_deep_as_the_room_and_its_parents_come_first():
    g = torch.Generator().manual_seed(1)
    found = Candidates(torch.zeros(3, dtype=torch.long), 3, 10)
    for width in (1, 3, 3):
        found.expand(torch.randn(3, width, 9, generator=g))
    draft = found.draft([3, 1, 0])
    assert [(row >= 0).sum().item() for row in draft.parents] == [10, 3, 0]
    assert bool((draft.parents < torch.arange(1, 11)).all())
    assert depths(draft.parents)[0].max() <= 3
    assert draft.q is None
    assert len(set(drafted_paths(draft, 0))) == 11


def test_sure_nodes_keep_their_parents():
    """Probability 1 all the way down: parent and child are equals."""
    found = Candidates(torch.zeros(1, dtype=torch.long), 2, 3)
    for width in (1, 2, 2):
        found.expand(torch.tensor([0.0, 5000.0, 0.0]).expand(1, width, 3))
    draft = found.draft([3])
    assert drafted_paths(draft, 0)[1:] == [(1,), (1, 1), (1, 1, 1)]


@pytest.mark.parametrize("verifier", ["token", "traversal", "coupled"])
@pytest.mark.parametrize("nodes", [1, 6, 30])
def test_greedy_ranked_trees_give_plain_decodings_tokens_alone_and_together(network, nodes, verifier):
    drafter = build_drafter(network, "eagle", tree_nodes=nodes, top_k=3)
    options = {"drafter": drafter, "verifier": verifier, "max_new_tokens": 16}
    plain = [row.token_ids for row in generate(network, PROMPTS, max_new_tokens=16)]
    for length in (0, 1, 4):
        out = generate(network, PROMPTS, num_draft_tokens=length, **options)
        assert [row.token_ids for row in out] == plain
    for prompt, row in zip(PROMPTS, out, strict=True):
        alone = generate(network, prompt, num_draft_tokens=4, **options)[0]
        assert (alone.token_ids, alone.acceptance) == (row.token_ids, row.acceptance)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.999, 1.0), (0.3, 0.3, 0.97)])
def test_a_chain_keeps_the_law(share, low, high):
    alpha = check_law(table_network("eagle", share), [1, 2], drafter="eagle", num_draft_tokens=3)
    assert low <= alpha <= high


def test_a_ranked_tree_keeps_the_law_of_sampling():
    network = table_network("eagle", 0.3)
    drafter = build_drafter(network, "eagle", tree_nodes=6, top_k=3)
    assert check_law(network, [1, 2], Sampling(temperature=0.9), drafter=drafter, num_draft_tokens=3) > 0.3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tree_nodes": 0}, "tree_nodes=0"),
        ({"tree_nodes": 8, "widths": [2]}, "widths and tree_nodes"),
        ({"tree_nodes": 8, "top_k": 0}, "top_k=0"),
        ({"tree_nodes": 8, "top_k": 65}, "top_k=65 is a tree wider than the vocabulary of 64"),
        ({"widths": [65]}, "wider than the vocabulary"),
    ],
)
def test_trees_that_cannot_be_are_refused(network, options, named):
    with pytest.raises(UserError, match=named):
        build_drafter(network, "eagle", **options)
