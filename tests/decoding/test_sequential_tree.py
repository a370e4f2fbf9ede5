"""What a sequential module says of a node of a tree is what the chain says along the node's path."""

import doctest
import itertools

import pytest
import torch
from drafters import drafter_for
from laws import check_law, table_network
from tiny import tiny_network
from trees import tree_steps

import decoding.staggered
from decoding import Sampling, generate
from decoding.cache import KVCache
from decoding.context import StepContext, paths
from decoding.generate import GREEDY, build_drafter
from decoding.sampling import RowSampling
from mtp import UserError

PROMPTS = [[5, 3, 9, 9, 1, 2], [4, 4, 4, 4, 8, 7, 6, 1, 4], [7, 8], [6, 1, 2], [3]]
WIDTHS = [2, 3, 1, 2]
RANKED = {"tree_nodes": 12, "top_k": 3}


@pytest.fixture(scope="module")
def exact():
    """In double precision, so that states which should be equal are, to ten digits."""
    return tiny_network().double()


def test_the_worked_example_holds():
    assert doctest.testmod(decoding.staggered, extraglobs={"torch": torch}).failed == 0


class Spoken:
    """A context that keeps the law behind every node, and forces draws to the tokens of a path."""

    def __init__(self, context, path=()):
        self.context, self.room, self.path = context, context.room, path
        self.laws = []  # (tokens before it [B, depth], law [B, V])

    def law(self, logits, path):
        self.laws.append((path, logits.double().softmax(-1)))
        return self.context.law(logits, path)

    def draw(self, law, depth, node):
        token, q = self.context.draw(law, depth, node)
        return (torch.full_like(token, self.path[depth - 1]) if depth <= len(self.path) else token), q

    def draw_siblings(self, law, logits, depth, nodes):
        return self.context.draw_siblings(law, logits, depth, nodes)


@torch.inference_mode()
def chain_laws(network, text, path, depth):
    """Laws at depths 1 ... depth [depth, V] of a chain that drafts `path`, from a fresh start on the text."""
    drafter = build_drafter(network, "sequential")
    cache = KVCache(1, network.trunk.device)
    drafter.reset(1, cache)
    row = torch.tensor([text[:-1]])
    keep = torch.ones_like(row, dtype=torch.bool)
    drafter.extend(row, network.trunk(row, taps=drafter.taps).states, keep)
    rows = RowSampling.stack([GREEDY], network.trunk.vocab_size, row.device)
    context = Spoken(StepContext(rows, torch.tensor([0]), [20], 0, depth), path)
    drafter.propose(torch.tensor([text[-1]]), depth, context)
    return torch.cat([law for _, law in context.laws])


@torch.inference_mode()
def forced_laws(network, text, path, depth):
    """The same from one teacher-forced pass of the head over text and path."""
    trunk, head = network.trunk, network.heads["sequential"]
    row = torch.tensor([text + list(path)])
    readouts = head.readouts(trunk, row, trunk(row, taps=head.taps).states, depth=depth)
    return torch.stack([trunk.lm_head(one.hidden[0, len(text) - 2]).double().softmax(-1) for one in readouts])


def listening(drafter):
    """A drafter whose proposals leave the laws behind them in `said`."""
    said, propose = [], drafter.propose

    def listened(root, count, context):
        spoken = Spoken(context)
        draft = propose(root, count, spoken)
        said.append(spoken.laws)
        return draft

    drafter.propose = listened
    return said


@pytest.mark.parametrize(("widths", "length"), [(WIDTHS, 4), ([3], 6), ([1, 4], 3)])
def test_every_path_of_a_tree_has_the_laws_of_the_chain_and_of_one_teacher_forced_pass(exact, widths, length):
    """After verdicts that end on all kinds of nodes, rows of all lengths side by side; length 6 is more than
    the four modules, of which the last is applied again."""
    drafter = build_drafter(exact, "sequential", widths=widths)
    said, compared = listening(drafter), 0
    steps = tree_steps(exact, drafter, PROMPTS, length=length)
    for (texts, _), laws in zip(steps, said, strict=True):
        deepest = max(path.shape[1] for path, _ in laws) + 1
        for row, text in enumerate(texts):
            if len(text) == 1:  # nothing is committed
                continue
            known = {tuple(path[row].tolist()): law[row] for path, law in laws}
            for path in (path for path in known if len(path) == deepest - 1):
                along = torch.stack([known[path[:depth]] for depth in range(deepest)])
                expected = chain_laws(exact, text, path, deepest)
                torch.testing.assert_close(along, expected, atol=1e-10, rtol=0)
                torch.testing.assert_close(along, forced_laws(exact, text, path, deepest), atol=1e-10, rtol=0)
                compared += 1
    assert compared > 60


def ranked_tree(network, text, *, nodes, top_k, depth):
    """EAGLE-2's tree by its definition: the paths."""
    beam, found = {(): 0.0}, {}
    for level in range(1, depth + 1):
        children = {}
        for path, score in beam.items():
            best = chain_laws(network, text, path, level)[-1].log().topk(top_k)
            children |= {
                (*path, token): score + value
                for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            }
        found |= children
        beam = dict(sorted(children.items(), key=lambda item: -item[1])[:top_k])
    return set(sorted(found, key=lambda path: -found[path])[:nodes])


def test_a_ranked_tree_has_the_most_probable_nodes(network):
    drafter = build_drafter(network, "sequential", **RANKED)
    for texts, draft in tree_steps(network, drafter, PROMPTS, length=4):
        for row, (text, drafted) in enumerate(zip(texts, paths(draft), strict=True)):
            if len(text) > 1:
                expected = ranked_tree(network, text, nodes=12, top_k=3, depth=4)
                assert {tuple(path) for path in drafted[1:]} == expected
            else:
                assert not (draft.parents[row] >= 0).any()


@pytest.mark.parametrize("verifier", ["token", "traversal", "coupled"])
@pytest.mark.parametrize("options", [{"widths": WIDTHS}, RANKED], ids=["fixed", "ranked"])
def test_greedy_trees_give_plain_decodings_tokens_alone_and_together(network, options, verifier):
    drafter = build_drafter(network, "sequential", **options)
    plain = [row.token_ids for row in generate(network, PROMPTS, max_new_tokens=14)]
    settings = {"drafter": drafter, "verifier": verifier, "max_new_tokens": 14}
    for length in (0, 1, 2, 4):
        out = generate(network, PROMPTS, num_draft_tokens=length, **settings)
        assert [row.token_ids for row in out] == plain
    for prompt, row in zip(PROMPTS, out, strict=True):
        alone = generate(network, prompt, num_draft_tokens=4, **settings)[0]
        assert (alone.token_ids, alone.acceptance) == (row.token_ids, row.acceptance)


def test_a_tree_of_one_path_is_the_chain(network):
    options = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 20}
    for length in (1, 3, 5):
        chain, tree = (
            generate(
                network, PROMPTS, num_draft_tokens=length,
                drafter=build_drafter(network, "sequential", widths=widths), **options,
            )
            for widths in (None, [1])
        )  # fmt: skip
        assert [(row.token_ids, row.acceptance) for row in chain] == [
            (row.token_ids, row.acceptance) for row in tree
        ]


def test_greedy_trees_with_processors_give_plain_decodings_tokens(network):
    rules = Sampling(repetition_penalty=1.3, bad_words=((49,), (13, 16)))
    plain = [row.token_ids for row in generate(network, PROMPTS, sampling=rules, max_new_tokens=16)]
    for options in ({"widths": WIDTHS}, RANKED):
        drafter = build_drafter(network, "sequential", **options)
        out = generate(network, PROMPTS, drafter=drafter, sampling=rules, max_new_tokens=16)
        assert [row.token_ids for row in out] == plain


@pytest.mark.parametrize("options", [{"widths": [2, 2]}, RANKED], ids=["fixed", "ranked"])
def test_a_sampled_row_with_rules_of_its_own_does_not_depend_on_the_rows_beside_it(network, options):
    """Rows end at different steps, so that `select` drops some while others go on."""
    drafter = build_drafter(network, "sequential", **options)
    samplings = [
        Sampling(temperature=0.9, repetition_penalty=1.3),
        Sampling(bad_words=((7,),)),
        Sampling(temperature=1.1, top_k=3),
        Sampling(temperature=1.0),
        Sampling(),
    ]
    limits, settings = [9, 25, 14, 1, 20], {"drafter": drafter, "verifier": "traversal"}
    out = generate(network, PROMPTS, sampling=samplings, max_new_tokens=limits, seed=5, **settings)
    for row, (prompt, sampling, limit) in enumerate(zip(PROMPTS, samplings, limits, strict=True)):
        alone = generate(network, prompt, sampling=sampling, max_new_tokens=limit, seed=5 + row, **settings)[
            0
        ]
        assert (alone.token_ids, alone.acceptance) == (out[row].token_ids, out[row].acceptance)


@pytest.mark.parametrize("options", [{"widths": [3, 2]}, RANKED], ids=["fixed", "ranked"])
def test_coupled_trees_give_the_text_of_plain_coupled_decoding(network, options):
    settings = {"verifier": "coupled", "sampling": Sampling(temperature=1.0), "max_new_tokens": 20}
    plain = generate(network, PROMPTS, **settings)
    tree = generate(network, PROMPTS, drafter=build_drafter(network, "sequential", **options), **settings)
    assert [row.token_ids for row in tree] == [row.token_ids for row in plain]


@pytest.mark.parametrize(
    ("share", "options", "verifier", "sampling"),
    [
        (0.3, {"widths": [2, 2]}, "token", Sampling(temperature=1.2)),
        (0.3, {"widths": [2, 2]}, "traversal", Sampling(temperature=0.8, top_k=5, top_p=0.93)),
        (1.0, {"widths": [3, 1]}, "traversal", Sampling(temperature=1.0)),
        (0.3, {"tree_nodes": 6, "top_k": 3}, "token", Sampling(temperature=0.9)),
    ],
)  # fmt: skip
def test_sampled_trees_keep_the_law(share, options, verifier, sampling):
    network = table_network("sequential", share)
    drafter = build_drafter(network, "sequential", **options)
    length = len(options.get("widths", [1, 1]))
    check_law(network, [1, 2], sampling, drafter=drafter, num_draft_tokens=length, verifier=verifier)


def test_a_tree_gets_more_accepted_than_a_chain():
    network = table_network("sequential", 0.6)
    options = {"sampling": Sampling(temperature=1.0), "max_new_tokens": 12, "num_draft_tokens": 3}
    steps = []
    for widths in (None, [2, 2, 1], [4, 2, 2]):
        drafter = build_drafter(network, "sequential", widths=widths)
        out = generate(network, [[1, 2]] * 200, drafter=drafter, **options)
        steps.append(sum(row.acceptance.steps for row in out))
    assert steps[0] > 1.05 * steps[1] > 1.05**2 * steps[2]


def test_chain_and_tree_find_the_streams_as_the_other_would_leave_them(exact):
    """A drafter that grows a tree in one step and a chain in the next has missed nothing."""
    drafter = build_drafter(exact, "sequential", widths=WIDTHS)
    said, propose = listening(drafter), drafter.propose
    growths = itertools.cycle([drafter.growth, build_drafter(exact, "sequential").growth])

    def turning(root, count, context):
        drafter.growth = next(growths)
        return propose(root, count, context)

    drafter.propose = turning
    for (texts, _), laws in zip(tree_steps(exact, drafter, PROMPTS, length=4), said, strict=True):
        for row, text in enumerate(texts):
            path, law = laws[-1]
            if len(text) > 1:
                expected = chain_laws(exact, text, path[row].tolist(), len(path[row]) + 1)[-1]
                torch.testing.assert_close(law[row], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("options", [{}, {"widths": [2, 2]}, RANKED], ids=["chain", "fixed", "ranked"])
@pytest.mark.parametrize("name", ["sequential", "eagle"])
def test_a_head_with_a_vocabulary_of_its_own_drafts_from_it_alone(name, options):
    network = tiny_network()
    ids = torch.arange(0, 64, 3)
    network.heads[name].draft_ids = ids
    for _, draft in tree_steps(network, build_drafter(network, name, **options), PROMPTS):
        assert torch.isin(draft.tokens[draft.parents >= 0], ids).all()
    plain = [row.token_ids for row in generate(network, PROMPTS, max_new_tokens=12)]
    out = generate(network, PROMPTS, drafter=build_drafter(network, name, **options), max_new_tokens=12)
    assert [row.token_ids for row in out] == plain


def test_a_vocabulary_too_small_for_the_tree_keeps_the_law():
    network = table_network("sequential", 0.3)
    network.heads["sequential"].draft_ids = torch.tensor([1, 4])
    for options in ({"widths": [3, 2]}, {"tree_nodes": 7, "top_k": 3}):
        drafter = build_drafter(network, "sequential", **options)
        check_law(network, [1, 2], Sampling(temperature=1.0), drafter=drafter, num_draft_tokens=2)


@pytest.mark.parametrize("options", [{"widths": [2, 2]}, RANKED], ids=["fixed", "ranked"])
def test_a_length_chosen_by_time_and_a_short_room_keep_the_tokens(network, options):
    drafter = build_drafter(network, "sequential", **options)
    plain = [row.token_ids for row in generate(network, PROMPTS, max_new_tokens=20)]
    out = generate(network, PROMPTS, drafter=drafter, num_draft_tokens="auto", max_new_tokens=20)
    assert [row.token_ids for row in out] == plain
    limits = [1, 2, 3, 4, 5]
    out = generate(network, PROMPTS, drafter=drafter, num_draft_tokens=4, max_new_tokens=limits)
    assert [row.token_ids for row in out] == [ids[:limit] for ids, limit in zip(plain, limits, strict=True)]


def test_a_tree_inside_a_hybrid_drafts_where_lookup_finds_nothing(network):
    drafter = drafter_for(network, "hybrid", head="sequential", head_options={"widths": [2, 2]})
    plain = [row.token_ids for row in generate(network, PROMPTS, max_new_tokens=20)]
    assert [row.token_ids for row in generate(network, PROMPTS, drafter=drafter, max_new_tokens=20)] == plain


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tree_nodes": 0}, "drafter=sequential: tree_nodes=0"),
        ({"tree_nodes": 8, "widths": [2]}, "drafter=sequential: widths and tree_nodes are two kinds"),
        ({"top_k": 0}, "top_k=0"),
        ({"tree_nodes": 8, "top_k": 7}, "top_k=7 is a tree wider than the vocabulary of 6"),
        ({"widths": [2, 7]}, r"widths=\[2, 7\] is a tree wider than the vocabulary of 6"),
        ({"widths": [0]}, "drafter=sequential: widths="),
    ],
)
def test_trees_that_cannot_be_are_refused(options, named):
    with pytest.raises(UserError, match=named):
        build_drafter(tiny_network(vocab_size=6), "sequential", **options)


def test_a_vocabulary_smaller_than_the_default_top_k_has_chains_and_fixed_trees():
    network = tiny_network(vocab_size=3)
    assert build_drafter(network, "sequential").growth.is_chain
    assert build_drafter(network, "sequential", widths=[3]).growth.widths == (3,)


def test_block_verification_of_a_tree_is_refused(network):
    drafter = build_drafter(network, "sequential", widths=[2])
    with pytest.raises(UserError, match="verifier=block tests chains"):
        generate(network, PROMPTS, drafter=drafter, verifier="block", max_new_tokens=8)
