"""One prompt, decoded greedily with every drafter: which tokens were drafted and accepted."""

from typing import Any

from ablation.drafters import drafter_maker
from ablation.plan import Planned
from ablation.subject import Subject
from decoding.generate import generate
from decoding.rows import Emitted

TOKENS = 96


def example(subject: Subject, row: Planned, num_draft_tokens: int) -> list[dict[str, str]]:
    """The pieces of text that one drafter helped to write, each with its kind."""
    pieces: list[dict[str, str]] = []

    def note(emitted: Emitted) -> None:
        for index, piece in enumerate(emitted.pieces):
            pieces.append({"text": piece, "kind": "accepted" if index < emitted.drafted else "next"})

    drafter = drafter_maker(subject.network, row.build)()
    generate(
        subject.network, subject.prompts["held_out"][0], drafter=drafter, observe=note,
        num_draft_tokens=num_draft_tokens, max_new_tokens=min(TOKENS, subject.new_tokens),
    )  # fmt: skip
    return pieces


def begun(subject: Subject) -> dict[str, Any]:
    ids = subject.prompts["held_out"][0]
    return {"prompt": subject.network.tokenizer.decode(ids, skip_special_tokens=True), "drafters": {}}
