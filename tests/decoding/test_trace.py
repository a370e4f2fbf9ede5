"""The trace page: what a step came to, told truly, in one file that loads nothing."""

import re
from html.parser import HTMLParser

import pytest
import torch
from drafters import drafter_for
from tiny import spelling_network

from decoding import Draft, Sampling, Verdict, generate
from decoding.generate import GREEDY, drafter_names
from decoding.loop import VERIFIERS
from decoding.prompts import Prompt
from decoding.rows import Row
from decoding.stopping import Limits, Output
from decoding.trace import Node, Step, Story, branch, chart, page, step_line
from decoding.tracer import Tracer, node_states

PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8]]
VOID = {"meta", "rect", "polyline"}


class Balanced(HTMLParser):
    """Collects texts and checks that every tag is closed in its place."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(text):
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser


def traced(network, prompts=PROMPTS, **options):
    tracer = Tracer(network.tokenizer)
    out = generate(network, prompts, trace=tracer, **{"max_new_tokens": 30} | options)
    return out, tracer.stories


@pytest.mark.parametrize("drafter", drafter_names())
def test_steps_tell_the_output_and_its_counts(network, drafter):
    built = drafter_for(network, drafter)
    out, stories = traced(network, drafter=built, sampling=Sampling(temperature=0.8), num_draft_tokens=3)
    for completion, story in zip(out, stories, strict=True):
        told = "".join(
            node.text
            for step in story.steps
            for node in (*step.nodes, step.supplied)
            if node and node.state in ("accepted", "supplied")
        )
        assert told.split() == [str(token) for token in completion.token_ids]
        assert len(story.steps) == completion.acceptance.steps
        assert story.acceptance == completion.acceptance
        assert sum(len(step.nodes) for step in story.steps) == completion.acceptance.drafted
        states = [node.state for step in story.steps for node in step.nodes]
        assert states.count("accepted") == completion.acceptance.accepted
        if drafter == "none":
            assert states == []


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_tracing_changes_nothing(network, verifier):
    options = {"drafter": "early_exit", "verifier": verifier, "sampling": Sampling(temperature=0.9)}
    out, _ = traced(network, **options)
    again = generate(network, PROMPTS, max_new_tokens=30, **options)
    assert [a.token_ids for a in out] == [b.token_ids for b in again]


def test_p_and_q_are_those_of_the_test(network):
    _, stories = traced(
        network, [PROMPTS[0]], drafter="early_exit", sampling=Sampling(temperature=0.7), num_draft_tokens=4
    )
    for step in stories[0].steps:
        for node in step.nodes:
            assert 0 < node.q <= 1
            assert node.state != "accepted" or node.p > 0
        assert step.supplied is None or step.supplied.p > 0
    prefix = PROMPTS[0]
    law = (network.trunk(torch.tensor([prefix])).logits[0, -1] / 0.7).softmax(-1)
    first = stories[0].steps[0].nodes[0]
    assert first.p == pytest.approx(law[int(first.text)].item(), abs=1e-5)
    own = network.trunk(torch.tensor([prefix])).logits[0, -1].softmax(-1)
    assert first.trunk == pytest.approx(own[int(first.text)].item(), abs=1e-5)
    assert [int(text) for text, _ in first.best] == own.topk(3).indices.tolist()


def test_a_greedy_draft_has_no_q_and_a_sure_p(network):
    _, stories = traced(network, [PROMPTS[0]], drafter="early_exit")
    nodes = [node for step in stories[0].steps for node in step.nodes]
    assert {node.q for node in nodes} == {None}
    assert {node.p for node in nodes} <= {0.0, 1.0}


def test_what_was_accepted_behind_the_end_is_no_output():
    network = spelling_network("abcdefgh")
    out, stories = traced(
        network, ["ha"], drafter="sequential", stop="d", num_draft_tokens=4, max_new_tokens=20
    )
    last = stories[0].steps[-1]
    assert "".join(node.text for node in last.nodes if node.state == "accepted") == "bcd"
    assert [node.state for node in last.nodes][-1] == "cut"
    assert last.supplied is None
    assert out[0].text == "bcd"
    assert stories[0].finish_reason == "stop"


def test_states_of_a_tree_follow_the_accepted_path():
    parents, accepted = [0, 0, 2, 2, 1], [True, False, True, False, True, False]
    assert node_states(parents, accepted, 3) == ["rejected", "accepted", "rejected", "accepted", "unreached"]
    assert node_states(parents, accepted, 1)[3] == "cut"


def test_a_tree_stands_as_nested_lists_and_a_chain_in_a_line():
    node = lambda n, parent: Node(n, f"<{n}>", parent, "rejected", 0.5, 0.25, 0.1)  # noqa: E731
    chain = Step((node(1, 0), node(2, 1)), None, ("x",))
    tree = Step((node(1, 0), node(2, 0), node(3, 1), node(5, 2)), None, ("x",))
    assert "<ul" not in step_line(chain)
    assert step_line(tree).count("<ul") == 3
    texts = parsed(branch(tree.nodes, 0)).texts
    assert texts == ["<1>", "<3>", "<2>", "<5>"]


def test_a_step_of_a_tree_is_told_with_the_nodes_that_are_used(network):
    tracer = Tracer(None)
    row = Row(0, Prompt([1], None), GREEDY, 0, Output([1], Limits(9), None))
    row.output.push(6)
    row.output.push(3)
    draft = Draft(torch.tensor([[5, 6, 0, 7]]), torch.tensor([[0, 0, -1, 2]]))
    verdict = Verdict(torch.tensor([[True, False, True, False, False]]), torch.tensor([3]))
    p = torch.full((1, 5, 8), 1 / 8)
    tracer([row], draft, p, p.log(), verdict)
    step = tracer.stories[0].steps[0]
    assert [(n.number, n.parent, n.state) for n in step.nodes] == [
        (1, 0, "rejected"), (2, 0, "accepted"), (4, 2, "rejected"),
    ]  # fmt: skip
    assert (step.supplied.text, step.supplied.parent, step.emitted) == ("3 ", 2, 2)


def test_the_page_is_one_file_with_every_text_escaped():
    text = "<script>alert('&')</script> \"x\"\n"
    network = spelling_network(text)
    _, stories = traced(network, ["<script>"], drafter="early_exit", max_new_tokens=60)
    found = page(stories, "a <title> & more")
    parser = parsed(found)
    tags = {tag for tag, _ in parser.tags}
    assert not tags & {"script", "link", "img", "iframe", "b"}
    assert not re.search(r"https?:|url\(|@import|\bsrc=", found)
    names = {name for _, attributes in parser.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")}
    assert "a <title> & more" in parser.texts
    assert "<script>" in parser.texts  # the prompt, as text
    assert any("p 1.000" in a["data-tip"] for _, a in parser.tags if "data-tip" in a)


def test_characters_of_several_tokens_stand_whole_in_the_text():
    network = spelling_network("é🙂 x")
    out, stories = traced(network, ["é"], drafter="early_exit", max_new_tokens=13)
    pieces = [piece for step in stories[0].steps for piece in step.pieces]
    assert "".join(pieces) == out[0].text
    assert "🙂" in pieces
    found = parsed(page(stories, "title")).texts
    assert "🙂" in found
    assert "⟨242⟩" in found  # 🙂 begins with byte 240, and a step tells tokens


def test_a_page_of_nothing_is_a_page():
    assert "n/a" in page([Story("x")], "title")
    parsed(page([], "title"))


def test_the_chart_shows_tau_as_it_comes_to_be():
    found = chart([1, 3, 2])
    assert [float(h) for h in re.findall(r'height="(\d+)"', found)] == [1, 3, 2]
    points = re.search(r'points="([^"]+)"', found)[1].split()
    assert [3 - float(point.split(",")[1]) for point in points] == pytest.approx([1, 2, 2], abs=1e-3)
    assert chart([]) == ""
    assert len(re.search(r'points="([^"]+)"', chart([4]))[1].split()) == 2
