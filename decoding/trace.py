"""The trace page: step by step what was drafted, accepted, rejected and supplied by the trunk."""

import html
from collections.abc import Iterable
from dataclasses import dataclass, field

from decoding.acceptance import Acceptance
from decoding.trace_style import STYLE

WORDS = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and rejected",
    "unreached": "drafted, not reached",
    "cut": "accepted behind the end",
    "supplied": "supplied by the trunk",
}
WRITTEN = ("accepted", "supplied")  # what stands in the output


@dataclass(frozen=True, slots=True)
class Node:
    """A token of a step with what was thought of it after its parent (0 is the root)."""

    number: int  # in the draft, from 1
    text: str
    parent: int
    state: str  # a key of WORDS
    p: float  # of the law that it was tested against or drawn from
    q: float | None  # None: nobody drew it, or without a law
    trunk: float  # the network's own probability, before temperature, filters and penalties
    best: tuple[tuple[str, float], ...] = ()  # the likeliest by that probability


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one row: the draft, then what the trunk supplied (None: behind the output's end)."""

    nodes: tuple[Node, ...]
    supplied: Node | None
    pieces: tuple[str, ...]  # text that became certain with each emitted token; empty inside a character

    @property
    def emitted(self) -> int:
        return len(self.pieces)


@dataclass(slots=True)
class Story:
    """All steps of one prompt."""

    prompt: str
    steps: list[Step] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish_reason: str | None = None


def page(stories: Iterable[Story], title: str) -> str:
    """The whole HTML document: no script, nothing loaded from anywhere."""
    body = "".join(section(number, story) for number, story in enumerate(stories, start=1))
    legend = "".join(f'<span class="t {state}">{word}</span> ' for state, word in WORDS.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="legend">{legend}</p>'
        '<p class="note">Point at a token, or touch it, to see p, its probability under the law that it was '
        "tested against, and q, that under the drafter's.</p>"
        f"{body}</body></html>\n"
    )


def section(number: int, story: Story) -> str:
    """One prompt: what it became, τ over time, and its steps."""
    counts = story.acceptance
    facts = [f"{counts.emitted} tokens in {counts.steps} steps", f"τ {shown(counts.tau)}"]
    facts += [f"α {shown(counts.alpha)}", f"ended by {story.finish_reason}"]
    pairs = zip(counts.accepted_at_depth, counts.tested_at_depth, strict=True)
    depths = ", ".join(f"depth {k}: {a}/{t}" for k, (a, t) in enumerate(pairs, start=1))
    steps = "".join(f"<li>{step_line(step)}</li>" for step in story.steps)
    tested = f'<p class="facts">accepted of tested at {depths}</p>' if depths else ""
    return (
        f'<section><h2>Prompt {number}</h2><p class="facts">{" · ".join(facts)}</p>{tested}'
        f'<pre class="text"><span class="prompt">{html.escape(story.prompt)}</span>{output(story)}</pre>'
        f"{chart([step.emitted for step in story.steps])}"
        f'<ol class="steps">{steps}</ol></section>'
    )


def output(story: Story) -> str:
    """The emitted tokens in order, coloured by who wrote them."""
    tokens = []
    for step in story.steps:
        path = [node for node in (*step.nodes, step.supplied) if node and node.state in WRITTEN]
        tokens += [token(node, piece) for node, piece in zip(path, step.pieces, strict=True) if piece]
    return "".join(tokens)


def step_line(step: Step) -> str:
    """A chain in one line; a tree as nested lists, every token beside its parent."""
    count = f'<span class="count">{step.emitted}</span>'
    supplied = (step.supplied,) if step.supplied else ()
    if any(node.parent != node.number - 1 for node in step.nodes):
        return count + branch((*supplied, *step.nodes), 0)
    arrow = '<span class="arrow">+</span>' if supplied else ""
    return f"{count}{''.join(map(token, step.nodes))}{arrow}{''.join(map(token, supplied))}"


def branch(nodes: tuple[Node, ...], parent: int) -> str:
    children = [node for node in nodes if node.parent == parent]
    items = "".join(f"<li>{token(node)}{branch(nodes, node.number)}</li>" for node in children)
    return f'<ul class="tree">{items}</ul>' if items else ""


def token(node: Node, piece: str | None = None) -> str:
    """One token: its piece of the text as it is, or by itself with its blanks as signs."""
    text, told = html.escape(signs(node.text) if piece is None else piece), html.escape(tip(node))
    return f'<span class="t {node.state}" tabindex="0" data-tip="{told}">{text}</span>'


def tip(node: Node) -> str:
    """What a token shows when pointed at."""
    lines = [f"{signs(node.text)} {WORDS[node.state]}: p {node.p:.3f}"]
    if node.state != "supplied":
        lines[0] += ", no q: drafted without drawing" if node.q is None else f", q {node.q:.3f}"
    likeliest = ", ".join(f"{signs(text)} {chance:.3f}" for text, chance in node.best)
    lines.append(f"network's own probability {node.trunk:.3f}; likeliest {likeliest}")
    return "\n".join(lines)


def signs(text: str) -> str:
    """Blanks one can see.

    >>> signs(" if\\n")
    '␣if↵'
    """
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")


def chart(emitted: list[int]) -> str:
    """Tokens of every step as bars, and τ so far as a line, in an SVG of one unit a step and a token."""
    if not emitted:
        return ""
    most, width = max(emitted), len(emitted)
    bars = "".join(
        f'<rect x="{i + 0.1:.1f}" y="{most - n}" width="0.8" height="{n}"/>' for i, n in enumerate(emitted)
    )
    total, points = 0, []
    for i, n in enumerate(emitted, start=1):
        total += n
        points.append(f"{i - 0.5:.1f},{most - total / i:.3f}")
    points = points * 2 if width == 1 else points
    return (
        f'<figure><svg viewBox="0 0 {width} {most}" preserveAspectRatio="none" role="img" '
        f'aria-label="tokens by step">{bars}<polyline points="{" ".join(points)}"/></svg>'
        f"<figcaption>Bars: tokens of each of {width} steps, the highest {most}. "
        f"Line: τ so far, {total / width:.2f} at the end.</figcaption></figure>"
    )


def shown(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
