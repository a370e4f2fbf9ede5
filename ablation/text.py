"""What a trunk's own text is like: a worse trunk loops, and text that loops is easy to draft.

Shapes: S tokens of prompts and text in one line, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from decoding.forecast import TEXTS_AT_ONCE, Written
from decoding.report import repeated_4grams
from mtp import Network

LONGEST = 4  # n of distinct-n


def distinct(texts: Sequence[list[int]], n: int) -> float | None:
    """Distinct n-grams by all n-grams, over all texts together; None where there are none.

    >>> distinct([[1, 2, 1, 2], [1, 2]], 1), distinct([[1, 2, 1, 2], [1, 2]], 2)
    (0.3333333333333333, 0.5)
    """
    grams = [tuple(text[at : at + n]) for text in texts for at in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


@torch.inference_mode()
def entropy(network: Network, texts: Sequence[Written]) -> float | None:
    """Of the trunk's law at temperature 1, nats a token, over texts that it wrote at that temperature."""
    total, count = 0.0, 0
    for at in range(0, len(texts), TEXTS_AT_ONCE):
        some = texts[at : at + TEXTS_AT_ONCE]
        size = max(len(text.token_ids) for text in some)
        lines = [text.token_ids + [0] * (size - len(text.token_ids)) for text in some]
        logits = network.trunk(torch.tensor(lines, device=network.trunk.device)).logits
        assert logits is not None
        for row, text in zip(logits, some, strict=True):
            logs = row[text.prompt - 1 : len(text.token_ids) - 1].float().log_softmax(-1)
            total -= float((logs.exp() * logs).sum())
            count += len(logs)
    return total / count if count else None


@torch.inference_mode()
def loss(network: Network, lines: Sequence[list[int]]) -> float:
    """Cross-entropy of the trunk on texts of equal length, nats a token, the first token given."""
    total, count = 0.0, 0
    for at in range(0, len(lines), TEXTS_AT_ONCE):
        tokens = torch.tensor(lines[at : at + TEXTS_AT_ONCE], device=network.trunk.device)
        logits = network.trunk(tokens).logits
        assert logits is not None
        found = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum"
        )
        total, count = total + float(found), count + tokens[:, 1:].numel()
    return total / count


def described(greedy: Sequence[Written]) -> dict[str, Any]:
    """distinct-1 ... distinct-4 and the share of repeated 4-grams of greedy texts."""
    own = [text.token_ids[text.prompt :] for text in greedy]
    shares = [repeated_4grams(text) for text in own]
    return {
        "distinct": [distinct(own, n) for n in range(1, LONGEST + 1)],
        "repeated_4grams": sum(shares) / len(shares) if shares else None,
    }
