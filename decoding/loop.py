"""The one loop: prefill, propose, score, verify, commit. Plain decoding is the same loop with no drafts.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.context import StepContext
from decoding.draft import Draft, Drafter, Verdict
from decoding.draft_length import Policy
from decoding.judge import Judged, Lines, Verifier, follow, judge
from decoding.reach import counted, reach_block, reach_token
from decoding.rows import Emitted, Row, emit
from decoding.sampling import RowSampling
from decoding.traversal import verify_traversal
from decoding.tree import in_line
from decoding.verify import verify_block, verify_token, verify_typical
from mtp import Network, UserError

# Told after every step: rows (with its tokens), draft, p and logits [B, N+1, V], verdict.
Trace = Callable[[list[Row], Draft, Tensor, Tensor, Verdict], None]
VERIFIERS = {
    "token": Verifier(verify_token, reach=reach_token, certain=follow),
    "block": Verifier(verify_block, trees=False, reach=reach_block, certain=follow),
    "traversal": Verifier(verify_traversal, reach=reach_block, certain=follow),
    "coupled": Verifier(verify_token, coupled=True, certain=follow),
    "typical": Verifier(verify_typical, lossless=False, certain=follow),
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
            texts=texts(rows), rules=[row.rules for row in rows], lengths=[row.length for row in rows],
            coupled=verifier.coupled,
        )  # fmt: skip
        draft = drafter.propose(root, length.most, context)
        parents, width = draft.parents.tolist(), draft.tokens.shape[1] + 1
        branches = not in_line(parents)
        if branches and not verifier.trees:
            raise UserError(
                "verifier=block tests chains, but the drafter drafts a tree; traversal is block for trees"
            )
        nodes = torch.cat([root[:, None], draft.tokens], dim=1) if width > 1 else root[:, None]
        window = cache.open(width, parents=draft.parents.cpu() if branches else None, causal=True)
        out = trunk(
            nodes, positions=window.positions, mask=window.mask, cache=cache,
            start=draft.exit_layer, states=draft.states, taps=drafter.taps,
        )  # fmt: skip
        judged = judge(verifier, context, out, draft, parents=parents, laws=trace is not None)
        keep = judged.keep(width)
        cache.commit(keep)
        drafter.extend(nodes, out.states, keep)
        root = judged.next_token
        going = emit(rows, judged, parents, out.logits if logprobs else None, observe)
        if trace is not None and judged.seen is not None:
            p, verdict = judged.seen
            trace(rows, draft, p, out.logits, verdict)
        if length.learns:
            reached = reaches(rows, judged, draft, parents, verifier)
            for row, most, chances in zip(rows, asked, reached, strict=True):
                length.learn(row.index, min(most, row.last_step[0]), chances)
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
        window = cache.open(width, causal=True)
        out = network.trunk(
            tokens, positions=window.positions, mask=window.mask, cache=cache, taps=drafter.taps, logits=False
        )
        keep = torch.arange(width) < lengths[:, None]
        cache.commit(keep)
        drafter.extend(tokens, out.states, keep)
    return torch.tensor([row.prompt.ids[-1] for row in rows], device=device)


def texts(rows: list[Row]) -> list[list[int]]:
    """The tokens of every row, where a processor reads them; they grow, so nothing else may ask for them."""
    return [row.text() if row.rules else [] for row in rows]


def settings(network: Network, rows: list[Row]) -> tuple[RowSampling, Tensor]:
    device = network.trunk.device
    sampling = RowSampling.stack([row.sampling for row in rows], network.trunk.vocab_size, device)
    return sampling, torch.tensor([row.seed for row in rows], dtype=torch.long, device=device)


def reaches(
    rows: list[Row], judged: Judged, draft: Draft, parents: Lines, verifier: Verifier
) -> list[list[float]]:
    """How surely every row's draft reached its depths: chances where there are any, else what came of it."""
    cold = all(row.sampling.temperature == 0 for row in rows)
    if verifier.reach is None or judged.seen is None or cold or not in_line(parents):
        return [counted(*row.last_step[1:]) for row in rows]
    chances = verifier.reach(judged.seen[0], draft).tolist()
    return [line[: row.last_step[0]] for line, row in zip(chances, rows, strict=True)]
