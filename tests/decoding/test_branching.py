"""Trees that a drafter grows: their shape, the laws of siblings, and that decoding with them stays exact."""

import doctest
import itertools

import pytest
import torch
from laws import check_law, table_network
from tiny import tiny_network
from trees import tree_steps

import decoding.branching
from decoding import Sampling, generate
from decoding.branching import draw_tree
from decoding.context import StepContext
from decoding.generate import build_drafter
from decoding.sampling import RowSampling, law
from decoding.shape import Shape, read_widths
from decoding.tree import depths
from mtp import UserError

PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8], [3, 3], [7, 8, 9, 7, 8, 9, 7, 8]]
HEADS = ["parallel", "medusa", "eagle"]
WIDTHS = (3, 2, 1)
PAIRS, UNEVEN = {"widths": [2, 2]}, {"paths": [[0], [1], [2], [0, 0], [0, 1], [2, 0]]}
SPARSE = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [2, 0, 0], [2, 0, 1]]
TREES = [
    *((name, {"widths": list(WIDTHS)}) for name in HEADS),
    *((name, {"paths": SPARSE}) for name in ("parallel", "medusa")),
]


def test_the_worked_example_is_right():
    assert doctest.testmod(decoding.branching).failed == 0


def context(samplings, size=6, *, seeds=None, room=9, coupled=False, step=0) -> StepContext:
    count = len(samplings)
    seeds = torch.arange(count) if seeds is None else seeds
    rows = RowSampling.stack(samplings, size, torch.device("cpu"))
    return StepContext(rows, seeds, [room] * count, step, 4, texts=[[1]] * count, coupled=coupled)


def test_a_tree_is_the_whole_product_of_its_widths():
    logits = [torch.randn(2, 6, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    draft = draw_tree(logits, Shape((2, 1, 2)), context([Sampling(temperature=1.0)] * 2), [9, 9])
    assert draft.parents[0].tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8]
    assert depths(draft.parents)[0].tolist() == [0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
    for row, node in itertools.product(range(2), range(12)):
        siblings = draft.tokens[row][draft.parents[row] == draft.parents[row, node]]
        assert len(set(siblings.tolist())) == len(siblings)


def test_a_sparse_tree_has_just_the_nodes_that_were_named():
    logits = [torch.randn(2, 6, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    shape = Shape(paths=frozenset(map(tuple, SPARSE)))
    draft = draw_tree(logits, shape, context([Sampling(temperature=1.0)] * 2), [9, 9])
    assert draft.parents[0].tolist() == [0, 0, 0, 1, 1, 3, 4, 6, 6]


def test_all_paths_of_widths_are_the_tree_of_these_widths():
    logits = [torch.randn(2, 6, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    paths = frozenset({(i,) for i in range(3)} | {(i, j) for i in range(3) for j in range(2)})
    found = [
        draw_tree(logits, shape, context([Sampling(temperature=1.0)] * 2), [9, 9])
        for shape in (Shape((3, 2)), Shape(paths=paths))
    ]
    assert all(
        torch.equal(getattr(found[0], name), getattr(found[1], name)) for name in ("tokens", "parents", "q")
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"paths": []}, "is not a list of lists of ranks"),
        ({"paths": [0, 1]}, "is not a list of lists of ranks"),
        ({"paths": [[0], []]}, "is not a list of lists of ranks"),
        ({"paths": [[0], [-1]]}, "is not a list of lists of ranks"),
        ({"paths": [[0], [0, 0, 0]]}, r"paths has \[0, 0, 0\], but not \[0, 0\] before it"),
        ({"paths": [[0], [2]]}, r"paths has \[2\], but not \[1\] before it"),
        ({"paths": [[rank] for rank in range(65)]}, "paths is a tree wider than the vocabulary of 64"),
        ({"paths": [[0]], "widths": [2]}, "widths and paths are two ways to say a tree"),
    ],
)
def test_paths_that_are_no_tree_are_refused(network, options, told):
    with pytest.raises(UserError, match=told):
        build_drafter(network, "medusa", **options)


def test_nodes_deeper_than_a_rows_room_are_unused():
    logits = [torch.zeros(3, 6)] * 3
    draft = draw_tree(logits, Shape((2, 2)), context([Sampling()] * 3), [3, 1, 0])
    assert [(row >= 0).sum().item() for row in draft.parents] == [2 + 4 + 4, 2, 0]


def test_siblings_are_drawn_without_replacement_from_the_law_that_they_declare():
    runs = 40_000
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, 0.3]).expand(runs, 6)
    q = logits[0].double().softmax(0)
    tokens, declared = context([Sampling(temperature=1.0)] * runs).draw_siblings(
        logits.softmax(-1), logits, 1, range(1, 4)
    )
    for order in itertools.permutations(range(6), 3):
        a, b, c = order
        chance = q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
        drawn = (tokens == torch.tensor(order)).all(1)
        assert abs(drawn.double().mean() - chance) < 4 * (chance / runs) ** 0.5
        if drawn.any():
            said = declared[drawn][0, [0, 1, 2], list(order)].double()
            assert said.prod() == pytest.approx(chance.item(), rel=1e-4)
    assert declared.sum(-1).sub(1).abs().max() < 1e-5
    assert (declared[:, 1].gather(1, tokens[:, :1]) == 0).all()


def test_a_law_with_too_few_tokens_goes_on_with_the_best_that_are_left():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -torch.inf, 0.5]])
    tokens, q = context([Sampling()]).draw_siblings(law(logits[None], greedy())[0], logits, 1, range(1, 5))
    assert tokens.tolist() == [[1, 3, 2, 5]]
    assert q is None
    narrow = Sampling(temperature=1.0, top_k=2)
    ctx = context([narrow, Sampling()], seeds=torch.tensor([5, 5]))
    two = logits.repeat(2, 1)
    tokens, q = ctx.draw_siblings(ctx.law(two, two[:, :0].long()), two, 1, range(1, 5))
    assert {*tokens[0, :2].tolist()} == {1, 3}
    assert tokens[:, 2:].tolist() == [[2, 5], [2, 5]]
    assert (q[0, 2:].max(-1).values == 1).all()
    assert (q[1].max(-1).values == 1).all()
    assert len({*tokens[0].tolist()}) == 4


def greedy():
    return RowSampling.stack([Sampling()], 6, torch.device("cpu"))


def test_coupled_siblings_are_the_successive_maxima_of_the_noise():
    logits = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    ctx = context([Sampling(temperature=1.0)] * 500, coupled=True)
    q = ctx.law(logits, logits[:, :0].long())
    tokens, declared = ctx.draw_siblings(q, logits, 1, range(1, 7))
    assert declared is None
    from decoding.coupling import gumbel

    noisy = q.double().log() + gumbel(ctx.seeds, ctx.position(0), 6)
    assert torch.equal(tokens, noisy.argsort(-1, descending=True))


def test_a_tree_with_one_child_each_is_the_chain():
    network = tiny_network()
    options = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 20, "num_draft_tokens": 3}
    for name in HEADS:
        chain, tree = (
            generate(network, PROMPTS, drafter=build_drafter(network, name, widths=widths), **options)
            for widths in (None, [1, 1, 1])
        )
        assert [row.token_ids for row in chain] == [row.token_ids for row in tree]
        assert [row.acceptance for row in chain] == [row.acceptance for row in tree]


@pytest.mark.parametrize(("name", "tree"), TREES)
@pytest.mark.parametrize(
    ("verifier", "lengths"), [("token", (0, 1, 2, 8)), ("traversal", (3,)), ("coupled", (3,))]
)
def test_greedy_trees_give_plain_decodings_tokens_alone_and_together(network, name, tree, verifier, lengths):
    drafter = build_drafter(network, name, **tree)
    options = {"verifier": verifier, "max_new_tokens": 16}
    plain = [row.token_ids for row in generate(network, PROMPTS, max_new_tokens=16)]
    for length in lengths:
        out = generate(network, PROMPTS, drafter=drafter, num_draft_tokens=length, **options)
        assert [row.token_ids for row in out] == plain
    alone = [generate(network, prompt, drafter=drafter, **options)[0] for prompt in PROMPTS[1:3]]
    assert [row.token_ids for row in alone] == plain[1:3]


@pytest.mark.parametrize("name", HEADS)
def test_a_sampled_row_does_not_depend_on_the_rows_beside_it(network, name):
    options = {"drafter": build_drafter(network, name, widths=[2, 2]), "verifier": "traversal"}
    samplings = [Sampling(temperature=0.9), Sampling(), Sampling(temperature=1.1, top_k=3)]
    limits = [9, 30, 14]
    out = generate(network, PROMPTS[:3], sampling=samplings, max_new_tokens=limits, seed=[5, 6, 7], **options)
    for row, (prompt, sampling, limit) in enumerate(zip(PROMPTS[:3], samplings, limits, strict=True)):
        alone = generate(network, prompt, sampling=sampling, max_new_tokens=limit, seed=5 + row, **options)
        assert alone[0].token_ids == out[row].token_ids
        assert alone[0].acceptance == out[row].acceptance


@pytest.mark.parametrize(("name", "tree"), TREES)
def test_coupled_trees_give_the_text_of_plain_coupled_decoding(network, name, tree):
    options = {"verifier": "coupled", "sampling": Sampling(temperature=1.0), "max_new_tokens": 25}
    plain = generate(network, PROMPTS, **options)
    found = generate(network, PROMPTS, drafter=build_drafter(network, name, **tree), **options)
    assert [row.token_ids for row in found] == [row.token_ids for row in plain]


@pytest.mark.parametrize(
    ("name", "tree", "verifier", "sampling"),
    [
        ("parallel", PAIRS, "token", Sampling(temperature=0.8, top_k=5, top_p=0.93)),
        ("parallel", PAIRS, "traversal", Sampling(temperature=1.2)),
        ("parallel", UNEVEN, "token", Sampling(temperature=1.2)),
        ("medusa", PAIRS, "traversal", Sampling(temperature=0.8, top_k=5, top_p=0.93)),
        ("medusa", UNEVEN, "traversal", Sampling(temperature=1.0)),
        ("eagle", PAIRS, "token", Sampling(temperature=1.2)),
        ("eagle", PAIRS, "traversal", Sampling(temperature=0.7, top_k=2)),
    ],
)
def test_sampled_trees_keep_the_law(name, tree, verifier, sampling):
    network = table_network(name, 0.3)
    drafter = build_drafter(network, name, **tree)
    check_law(network, [1, 2], sampling, drafter=drafter, num_draft_tokens=2, verifier=verifier)


def test_more_siblings_get_more_accepted():
    network = table_network("parallel", 1.0)
    options = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 12}
    steps = []
    for widths in ([1], [2], [4]):
        drafter = build_drafter(network, "parallel", widths=widths)
        out = generate(network, [[1, 2]] * 200, drafter=drafter, num_draft_tokens=1, **options)
        steps.append(sum(row.acceptance.steps for row in out))
    assert steps[0] > 1.05 * steps[1] > 1.05**2 * steps[2]


@pytest.mark.parametrize("name", ["parallel", "medusa"])
def test_the_tree_after_any_verdict_is_that_of_a_fresh_start(network, name):
    """EAGLE's own trees are checked node by node in test_eagle."""
    options = {"widths": [2, 2]}
    for texts, draft in tree_steps(network, build_drafter(network, name, **options), PROMPTS[1:3]):
        for row, text in enumerate(texts):
            if len(text) == 1:  # nothing is committed
                assert not (draft.parents[row] >= 0).any()
                continue
            (_, first), *_ = tree_steps(network, build_drafter(network, name, **options), [text], steps=1)
            assert torch.equal(draft.tokens[row], first.tokens[0])
            assert torch.equal(draft.parents[row], first.parents[0])


def test_block_verification_of_a_tree_is_refused(network):
    drafter = build_drafter(network, "parallel", widths=[2, 2])
    with pytest.raises(UserError, match="verifier=block tests chains"):
        generate(network, PROMPTS, drafter=drafter, verifier="block", max_new_tokens=8)


def test_a_chain_of_widths_may_be_verified_by_block(network):
    drafter = build_drafter(network, "parallel", widths=[1, 1])
    generate(network, PROMPTS, drafter=drafter, verifier="block", max_new_tokens=8)


@pytest.mark.parametrize("widths", [[], [0], [2, -1], [1.5], [True], "2", 3.0, [None]])
def test_widths_that_are_no_numbers_are_refused(widths):
    with pytest.raises(UserError, match="widths="):
        read_widths("parallel", widths, 64)


def test_a_tree_wider_than_the_vocabulary_is_refused_by_name(network):
    with pytest.raises(UserError, match=r"widths=\[2, 65\] is a tree wider than the vocabulary of 64"):
        build_drafter(network, "parallel", widths=[2, 65])
    assert build_drafter(tiny_network(vocab_size=6), "parallel", widths=[6]).shape == Shape((6,))


def test_a_length_chosen_by_time_counts_depths_not_nodes(network):
    drafter = build_drafter(network, "parallel", widths=[2, 2])
    out = generate(network, PROMPTS, drafter=drafter, num_draft_tokens="auto", max_new_tokens=30)
    assert [row.token_ids for row in out] == [
        row.token_ids for row in generate(network, PROMPTS, max_new_tokens=30)
    ]
