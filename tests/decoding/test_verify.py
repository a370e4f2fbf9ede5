"""Verifiers against exact enumeration: integrated over their uniforms, the emitted tokens follow the target's
law."""

import doctest

import pytest
import torch
from exact import Models, Outcomes, all_drafts, emitted, integrate, leaves, only, path, thresholds
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding import Draft, traversal, verify_block, verify_token, verify_traversal
from decoding.loop import VERIFIERS as VERIFIERS_BY_NAME
from decoding.noise import uniforms
from decoding.tree import ancestors
from decoding.verify import walk_chain, walk_tree

V = 3
VERIFIERS = [verify_token, verify_block, verify_traversal]
TREES = {  # parents; nodes may come level by level, branch by branch, or mixed
    "nothing": [],
    "one": [0],
    "chain of two": [0, 1],
    "chain of three": [0, 1, 2],
    "three siblings": [0, 0, 0, 2],
    "pairs by level": [0, 0, 1, 1, 2, 2],
    "pairs by branch": [0, 1, 1, 0, 4, 4],
    "uneven by level": [0, 0, 1, 1, 3],
    "uneven by branch": [0, 1, 2, 1, 0],
    "uneven mixed": [0, 1, 0, 3, 1],
}
CHAINS = [name for name, parents in TREES.items() if parents == list(range(len(parents)))]
CASES = [(verify, name) for verify in VERIFIERS for name in (CHAINS if verify is verify_block else TREES)]


def families(parents):
    """What a tree is tried with: random laws, some with impossible tokens, and every kind of siblings."""
    yield Models(1), "sure"
    yield Models(2, zeros="p"), "mixed"
    yield Models(3, sharpness=3.0), "distinct"
    if len(parents) < 6:  # 729 drafts of six nodes would take long
        yield Models(4, sharpness=2.0), "iid"
    if len(parents) < 5:
        yield Models(5, sharpness=2.0, zeros="pq"), "iid"


@pytest.mark.parametrize(("verify", "tree"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_accepted_path_and_next_token_follow_p_exactly(verify, tree):
    parents = TREES[tree]
    tried = [(models, *all_drafts(models, parents, kind)) for models, kind in families(parents)]
    outcomes = integrate(verify, torch.cat([case[2] for case in tried]), stacked([case[3] for case in tried]))
    sizes = [len(case[1]) for case in tried]
    parts = zip(tried, outcomes.chance.split(sizes), outcomes.law.split(sizes), strict=True)
    for (models, weight, _, draft), chance, law in parts:
        found = emitted(models, weight, draft, parents, Outcomes(chance, law))
        height = max(len(path(parents, node)) for node in range(len(parents) + 1))
        assert (found - models.joint(height + 1)).abs().max() < 1e-9


def stacked(drafts):
    return Draft(
        *[torch.cat([getattr(draft, name) for draft in drafts]) for name in ("tokens", "parents", "q")]
    )


@pytest.mark.parametrize("verify", VERIFIERS)
def test_a_draft_law_that_is_p_itself_is_accepted_whole(verify):
    models = Models(7)
    models.q = models.p
    _, p, draft = all_drafts(models, TREES["chain of three"], "iid")
    chance = integrate(verify, p, draft).chance
    assert torch.equal(chance[:, -1], torch.ones(len(p), dtype=torch.float64))


def test_block_accepts_at_least_as_many_as_token_for_each_of_a_thousand_pairs():
    for length, pairs in ((2, 900), (3, 100)):
        models = [Models(seed, sharpness=(0.5, 1.0, 2.0, 4.0)[seed % 4]) for seed in range(pairs)]
        weights, p, drafts = zip(*[all_drafts(m, list(range(length)), "iid") for m in models], strict=True)
        p, draft, depth, means = torch.cat(p), stacked(drafts), torch.arange(length + 1), []
        for verify in (verify_block, verify_token):
            chance, _ = leaves(verify, p, draft, thresholds(verify, p, draft))
            means.append(((chance * depth).sum(1).reshape(pairs, -1) * torch.stack(weights)).sum(1))
        gain = means[0] - means[1]
        assert gain.min() > -1e-9
        assert gain.mean() > 0.01


@pytest.mark.parametrize("verifier", ["token", "block", "traversal"])
@pytest.mark.parametrize("kind", ["iid", "sure"])
def test_a_chains_reach_is_the_chance_of_every_depth_given_the_tokens_so_far(verifier, kind):
    """P(tau >= i | X_1 ... X_i) = P_i for block, and the product of min(1, p/q) token by token."""
    rule = VERIFIERS_BY_NAME[verifier]
    weight, p, draft = all_drafts(Models(6, sharpness=2.0), TREES["chain of three"], kind)
    reach, reached = rule.reach(p, draft), integrate(rule.verify, p, draft).reached(draft.parents)[:, 1:]
    for depth in range(3):
        _, same = draft.tokens[:, : depth + 1].unique(dim=0, return_inverse=True)
        share = torch.zeros(int(same.max()) + 1, dtype=torch.float64).index_add_(0, same, weight)
        mean = torch.zeros_like(share).index_add_(0, same, weight * reached[:, depth]) / share
        assert (mean[same] - reach[:, depth]).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("verify", "expected"), [(verify_block, 11 / 9), (verify_traversal, 11 / 9), (verify_token, 10 / 9)]
)
def test_the_papers_toy_accepts_eleven_ninths_by_block_and_ten_ninths_by_token(verify, expected):
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts (2403.10444)."""
    toy = Models(0, size=2)
    toy.p = [torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(*[2] * k, 2) for k in range(3)]
    toy.q = [law.flip(-1) for law in toy.p]
    weight, p, draft = all_drafts(toy, [0, 1], "iid")
    assert abs((weight * integrate(verify, p, draft).accepted(draft.parents)).sum() - expected) < 1e-9


def random_drafts(parents, rows, seed, dtype=torch.float64):
    """Random laws, and drafts drawn from q; parents is one tree for all, or one a row."""
    g, parents = torch.Generator().manual_seed(seed), torch.as_tensor(parents)
    count = parents.shape[-1]
    p, q = (torch.randn(rows, n, V, generator=g, dtype=dtype).softmax(-1) for n in (count + 1, count))
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).reshape(rows, count)
    u = torch.rand(rows, count + 1, generator=g, dtype=torch.float64)
    return p, Draft(tokens, parents.expand(rows, -1), q), u


def same(one, other):
    return torch.equal(one.accepted, other.accepted) and torch.equal(one.next_token, other.next_token)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sure", [False, True])
def test_traversal_of_a_chain_is_block_verification_decision_by_decision(sure, dtype):
    node = torch.arange(4)
    parents = torch.where(node < torch.arange(4000)[:, None] % 5, node, -1)  # 0 ... 4 nodes a row
    p, draft, u = random_drafts(parents, 4000, 0, dtype)
    draft = Draft(draft.tokens, draft.parents) if sure else draft
    block = verify_block(p, draft, u)
    assert same(block, verify_traversal(p, draft, u))
    assert block.accepted.sum(1).unique().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tree", ["pairs by level", "pairs by branch", "uneven mixed", "three siblings"])
def test_traversal_ends_where_the_paper_says_with_the_papers_probabilities(tree):
    parents = TREES[tree]
    _, p, draft = all_drafts(Models(8, sharpness=2.0), parents, "distinct")
    some = torch.arange(0, len(p), 1 + len(p) // 12)
    p, draft = p[some], only(draft, some)
    outcomes = integrate(verify_traversal, p, draft)
    for row in range(len(p)):
        book = by_the_book(parents, draft.tokens[row].tolist(), list(p[row]), draft.q[row])
        for node, (chance, law) in book.items():
            assert abs(outcomes.chance[row, node] - chance) < 1e-9
            assert chance < 1e-9 or (outcomes.law[row, node] - law).abs().max() < 1e-9


def by_the_book(parents, tokens, laws, q):
    """Traversal of one draft step by step (2505.12398): {end of the path: (probability, next law)}."""
    children = {v: [n for n in range(1, len(laws)) if parents[n - 1] == v] for v in range(len(laws))}
    reach, found, still = {0: torch.tensor(1.0)}, {}, 1.0

    def leftmost(v):
        for n in children[v][:1]:
            x = tokens[n - 1]
            reach[n] = (reach[v] * laws[v][x] / q[n - 1][x]).clamp(max=1)
            return leftmost(n)
        return v

    leaf = leftmost(0)
    while leaf:
        found[leaf] = still * reach[leaf], laws[leaf]
        still = still * (1 - reach[leaf])
        v = parents[leaf - 1]
        children[v].remove(leaf)
        rest = (reach[v] * laws[v] - q[leaf - 1]).clamp(min=0)
        if rest.sum() > 0:
            laws[v] = rest / rest.sum()
        reach[v] = rest.sum() / (rest.sum() + 1 - reach[v]) if rest.sum() + 1 - reach[v] > 0 else reach[v]
        leaf = leftmost(v)
    return {**found, 0: (still, laws[0])}


@pytest.mark.parametrize("verify", [verify_token, verify_traversal])
def test_the_order_of_the_nodes_does_not_matter_while_siblings_keep_theirs(verify):
    p, draft, u = random_drafts(TREES["pairs by level"], 2000, 1)
    by_branch = torch.tensor([1, 3, 4, 2, 5, 6])  # the old number of each node
    moved = Draft(
        draft.tokens[:, by_branch - 1],
        torch.tensor([[0, 1, 1, 0, 4, 4]]).expand(2000, -1),
        draft.q[:, by_branch - 1],
    )
    nodes = torch.tensor([0, *by_branch])
    verdict = verify(p, draft, u)
    other = verify(p[:, nodes], moved, torch.cat([u[:, by_branch - 1], u[:, -1:]], 1))
    assert torch.equal(other.accepted, verdict.accepted[:, nodes])
    assert torch.equal(other.next_token, verdict.next_token)


@pytest.mark.parametrize("verify", [verify_token, verify_traversal])
def test_a_row_depends_on_its_own_tree_only_and_unused_nodes_change_nothing(verify):
    """A batch of all trees, each with an unused node of rubbish before its last one, against each alone."""
    trees = [parents for parents in TREES.values() if parents]
    width = max(map(len, trees)) + 1
    padded = [[*tree[:-1], -1, tree[-1]] + [-1] * (width - len(tree) - 1) for tree in trees]
    p, draft, u = random_drafts(torch.tensor(padded * 100), 100 * len(trees), 2)
    draft.q[draft.parents < 0] = 0.0
    together = verify(p, draft, u)
    assert not (together.accepted[:, 1:] & (draft.parents < 0)).any()
    for number, tree in enumerate(trees):
        rows = torch.arange(number, len(p), len(trees))
        kept = torch.tensor([*range(len(tree) - 1), len(tree)])  # columns of its nodes
        nodes, one = torch.cat([torch.tensor([0]), kept + 1]), only(draft, rows)
        one = Draft(one.tokens[:, kept], torch.tensor(tree).expand(len(rows), -1), one.q[:, kept])
        alone = verify(p[rows][:, nodes], one, torch.cat([u[rows][:, kept], u[rows, -1:]], 1))
        assert torch.equal(alone.accepted, together.accepted[rows][:, nodes])
        assert torch.equal(alone.next_token, together.next_token[rows])


@pytest.mark.parametrize(("verify", "tree"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_no_law_is_the_same_as_a_point_mass(verify, tree):
    p, draft, u = random_drafts(TREES[tree], 500, 3)
    q = torch.nn.functional.one_hot(draft.tokens, V).double()
    assert same(
        verify(p, Draft(draft.tokens, draft.parents), u), verify(p, Draft(draft.tokens, draft.parents, q), u)
    )


@pytest.mark.parametrize(("verify", "tree"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_u_of_zero_never_accepts_what_the_target_gives_no_probability(verify, tree):
    p, draft, u = random_drafts(TREES[tree], 500, 4)
    p[..., 0] = 0.0
    path_of = ancestors(draft.parents)[:, :, 1:] & (draft.tokens == 0)[:, None]
    accepted = verify(p, draft, torch.zeros_like(u)).accepted
    assert not (accepted & path_of.any(2)).any()
    assert len(TREES[tree]) == 0 or accepted[:, 1:].any()


def test_traversals_worked_example():
    assert doctest.testmod(traversal) == (0, 2)  # failed, attempted


def test_case_11_residual_is_the_clipped_difference_divided_by_its_sum():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0]).expand(20_000, 2, 4)
    q = torch.tensor([0.1, 0.6, 0.2, 0.1]).expand(20_000, 1, 4)
    u = uniforms(torch.arange(20_000), 0, 1, 1)
    drafted = (u >= q[:, 0].cumsum(-1)).sum(-1, keepdim=True).clamp(max=3)
    verdict = verify_token(
        p, Draft(drafted, torch.zeros_like(drafted), q), uniforms(torch.arange(20_000), 0, 2, 2)
    )
    taken = verdict.accepted[:, 1]
    first = torch.where(taken, drafted[:, 0], verdict.next_token)
    assert abs(taken.float().mean() - 0.6) < 0.015
    frequency = torch.bincount(first, minlength=4) / 20_000
    assert (frequency - p[0, 0]).abs().max() < 0.015
    assert frequency[3] == 0


@pytest.mark.parametrize("verify", VERIFIERS)
def test_case_12_a_sure_draft_is_accepted_with_its_target_probability(verify):
    p = torch.tensor([0.2, 0.5, 0.3]).expand(20_000, 2, 3)
    draft = Draft(torch.zeros(20_000, 1, dtype=torch.long), torch.zeros(20_000, 1, dtype=torch.long))
    verdict = verify(p, draft, uniforms(torch.arange(20_000), 0, 2, 2))
    taken = verdict.accepted[:, 1]
    first = torch.where(taken, 0, verdict.next_token)
    assert abs(taken.float().mean() - 0.2) < 0.015
    assert (torch.bincount(first, minlength=3) / 20_000 - p[0, 0]).abs().max() < 0.015


def test_siblings_are_tested_in_turn_and_the_rest_is_the_residual():
    """Two different sure children of the root: p0 first, then p1 of what is left, then what neither took."""
    runs = 50_000
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).expand(runs, 3, 3)
    draft = Draft(torch.tensor([[0, 1]]).expand(runs, -1), torch.zeros(runs, 2, dtype=torch.long))
    verdict = verify_token(p, draft, uniforms(torch.arange(runs), 0, 2, 3))
    rates = verdict.accepted.double().mean(0)
    assert abs(rates[1] - 0.2) < 0.01
    assert abs(rates[2] - 0.3) < 0.01
    rejected = ~verdict.accepted[:, 1:].any(1)
    assert (verdict.next_token[rejected] == 2).all()


def test_unused_nodes_are_never_accepted():
    p = torch.full((4, 3, V), 1 / V)
    draft = Draft(torch.zeros(4, 2, dtype=torch.long), torch.full((4, 2), -1))
    for verify in VERIFIERS:
        verdict = verify(p, draft, torch.zeros(4, 3, dtype=torch.float64))
        assert verdict.accepted.tolist() == [[True, False, False]] * 4


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**31 - 1), st.integers(0, 4), st.booleans(), st.booleans())
def test_a_chain_verified_at_once_gets_the_verdict_of_the_walk_node_by_node(seed, count, drawn, sparse):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(3, count + 1, 5, generator=generator)
    q = torch.rand(3, count, 5, generator=generator)
    if sparse:  # one-hot targets, as greedy ones are
        p = (p == p.amax(-1, keepdim=True)).float()
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.randint(0, 5, (3, count), generator=generator)
    lengths = torch.randint(0, count + 1, (3, 1), generator=generator)
    parents = torch.where(torch.arange(count) < lengths, torch.arange(count), -1)
    draft = Draft(tokens, parents, q if drawn else None)
    u = torch.rand(3, count + 1, generator=generator, dtype=torch.float64)
    once, walked = walk_chain(p, draft, u), walk_tree(p, draft, u)
    assert torch.equal(once.accepted, walked.accepted)
    assert torch.equal(once.next_token, walked.next_token)
