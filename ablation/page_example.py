"""One text, as every drafter helped to write it."""

import html
from typing import Any

from ablation.page_findings import counting

KINDS = {"accepted": "drafted and accepted", "next": "supplied by the trunk"}


def section(example: dict[str, Any]) -> str:
    """Every drafter's text with accepted tokens marked; greedy, so that all texts are one."""
    legend = ", ".join(f'<span class="{kind}">{words}</span>' for kind, words in KINDS.items())
    setting = html.escape(str(example.get("setting") or "").replace("_", " "))
    where = f"setting: {setting}; " if setting else ""
    prompt = str(example.get("prompt") or "")
    texts = "".join(drafted(name, tokens, prompt) for name, tokens in example["drafters"].items())
    return (
        f'<section><h2>One text, every drafter</h2><p class="dim">{where}{legend}. A step ends with the '
        f'token that the trunk supplies.</p><div class="row">{texts}</div></section>'
    )


def drafted(name: str, tokens: list[dict[str, str]], prompt: str) -> str:
    """A drafter's text behind the prompt, and what it did for it."""
    accepted = sum(token["kind"] == "accepted" for token in tokens)
    steps = sum(token["kind"] == "next" for token in tokens)
    facts = f"{accepted} of {counting(len(tokens), 'token')} were drafted"
    if steps:
        facts += f", {counting(steps, 'step')}, {len(tokens) / steps:.2f} tokens a step"
    body = "".join(piece(token) for token in tokens)
    return (
        f'<div><h4><code>{html.escape(name)}</code> <span class="dim">{facts}</span></h4>'
        f'<pre class="text"><span class="prompt">{html.escape(prompt)}</span>{body}</pre></div>'
    )


def piece(token: dict[str, str]) -> str:
    kind = token["kind"] if token["kind"] in KINDS else "next"
    return f'<span class="{kind}">{html.escape(token["text"])}</span>'
