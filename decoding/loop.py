"""The one loop: prefill, propose, score, verify, commit. Plain decoding is the same loop with no drafts.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.context import StepContext
from decoding.draft import Draft, Drafter, Verdict
from decoding.draft_length import Policy
from decoding.reach import counted, reach_block, reach_token
from decoding.rows import Emitted, Row, emit
from decoding.sampling import RowSampling
from decoding.traversal import verify_traversal
from decoding.tree import is_chain
from decoding.verify import verify_block, verify_token, verify_typical
from mtp import Network, UserError


@dataclass(frozen=True, slots=True)
class Verifier:
    """A rule that accepts drafts. Coupled: laws are made one-hot by the position's noise before it looks."""

    verify: Callable[[Tensor, Draft, Tensor], Verdict]
    coupled: bool = False
    lossless: bool = True
    trees: bool = True  # whether it tests siblings
    reach: Callable[[Tensor, Draft], Tensor] | None = None  # [B, N] a chain's chances; see decoding.reach


# Told after every step: rows (with its tokens), draft, p and logits [B, N+1, V], verdict.
Trace = Callable[[list[Row], Draft, Tensor, Tensor, Verdict], None]
VERIFIERS = {
    "token": Verifier(verify_token, reach=reach_token),
    "block": Verifier(verify_block, trees=False, reach=reach_block),
    "traversal": Verifier(verify_traversal, reach=reach_block),
    "coupled": Verifier(verify_token, coupled=True),
    "typical": Verifier(verify_typical, lossless=False),
}


@torch.inference_mode()
def decode(
    network: Network,
    rows: list[Row],
    drafter: Drafter,
    length: Policy,
    verifier: Verifier,
    observe: Callable[[Emitted], None] | None = None,
    trace: Trace | None = None,
) -> None:
    """Run rows, all together, to their ends; results stand in the rows."""
    began = time.perf_counter()
    rows = [row for row in rows if row.output.finish_reason is None]
    if not rows:
        return
    trunk, logprobs = network.trunk, rows[0].logprobs is not None
    cache = KVCache(len(rows), trunk.device)
    drafter.reset(len(rows), cache)
    root = prefill(network, rows, drafter, cache)
    sampling, seeds = settings(network, rows)
    step = 0
    while rows:
        asked = length.ask([row.index for row in rows])
        room = [min(row.room(), most) for row, most in zip(rows, asked, strict=True)]
        context = StepContext(
            sampling, seeds, room, step, length.most,
            texts=texts(rows, verifier), rules=[row.rules for row in rows], coupled=verifier.coupled,
        )  # fmt: skip
        draft = drafter.propose(root, length.most, context)
        parents = draft.parents.cpu()
        if not (verifier.trees or is_chain(parents)):
            raise UserError(
                "verifier=block tests chains, but the drafter drafts a tree; traversal is block for trees"
            )
        nodes = torch.cat([root[:, None], draft.tokens], dim=1)
        window = cache.open(nodes.shape[1], parents=parents)
        out = trunk(
            nodes, positions=window.positions, mask=window.mask, cache=cache,
            start=draft.exit_layer, states=draft.states, taps=drafter.taps,
        )  # fmt: skip
        p = context.laws(out.logits, draft)
        verdict = verifier.verify(p, draft, context.uniforms(draft))
        host = torch.cat([nodes[:, 1:], verdict.next_token[:, None], verdict.accepted], dim=1).cpu()
        tokens, keep = host[:, : nodes.shape[1]], host[:, nodes.shape[1] :].bool()
        cache.commit(keep)
        drafter.extend(nodes, out.states, keep)
        root = verdict.next_token
        going = emit(rows, tokens, keep, parents, out.logits if logprobs else None, observe)
        if trace is not None:
            trace(rows, draft, p, out.logits, verdict)
        if length.learns:
            for row, reached in zip(rows, reaches(rows, p, draft, parents, verifier), strict=True):
                length.learn(row.index, reached)
        now = time.perf_counter()
        for row in rows:
            row.seconds = now - began
        if len(going) < len(rows):
            rows = [rows[index] for index in going]
            if rows:
                index = torch.tensor(going)
                cache.select(index)
                drafter.select(index)
                root = root[index.to(root.device)]
                sampling, seeds = settings(network, rows)
        step += 1


def prefill(network: Network, rows: list[Row], drafter: Drafter, cache: KVCache) -> Tensor:
    """Run every prompt without its last token, which becomes the first root [B]; shorter rows are padded.

    The padding lies behind each row's own tokens, so nothing that counts can see it.
    """
    device = network.trunk.device
    lengths = torch.tensor([len(row.prompt.ids) - 1 for row in rows])
    width = int(lengths.max())
    if width:
        padded = [row.prompt.ids[:-1] + [0] * (width - len(row.prompt.ids) + 1) for row in rows]
        tokens = torch.tensor(padded, device=device)
        window = cache.open(width)
        out = network.trunk(
            tokens, positions=window.positions, mask=window.mask, cache=cache, taps=drafter.taps, logits=False
        )
        keep = torch.arange(width) < lengths[:, None]
        cache.commit(keep)
        drafter.extend(tokens, out.states, keep)
    return torch.tensor([row.prompt.ids[-1] for row in rows], device=device)


def texts(rows: list[Row], verifier: Verifier) -> list[list[int]]:
    """Every row's tokens, where a processor or the coupling's positions need them."""
    needed = verifier.coupled or any(row.rules for row in rows)
    return [row.text() for row in rows] if needed else []


def settings(network: Network, rows: list[Row]) -> tuple[RowSampling, Tensor]:
    device = network.trunk.device
    sampling = RowSampling.stack([row.sampling for row in rows], network.trunk.vocab_size, device)
    return sampling, torch.tensor([row.seed for row in rows], dtype=torch.long, device=device)


def reaches(
    rows: list[Row], p: Tensor, draft: Draft, parents: Tensor, verifier: Verifier
) -> list[list[float]]:
    """How surely every row's draft reached its depths: chances where there are any, else what came of it."""
    if verifier.reach is None or all(row.sampling.temperature == 0 for row in rows) or not is_chain(parents):
        return [counted(*row.last_step) for row in rows]
    chances = verifier.reach(p, draft).tolist()
    return [line[:drafted] for line, drafted in zip(chances, (parents >= 0).sum(1).tolist(), strict=True)]
