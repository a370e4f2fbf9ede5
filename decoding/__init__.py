"""From networks to tokens, losslessly."""

from decoding.acceptance import Acceptance
from decoding.draft import Context, Draft, Drafter, Verdict
from decoding.generate import generate
from decoding.hf import speculative
from decoding.rows import Completion, Emitted
from decoding.sampling import Sampling
from decoding.traversal import verify_traversal
from decoding.verify import verify_block, verify_token, verify_typical

__all__ = [
    "Acceptance", "Completion", "Context", "Draft", "Drafter", "Emitted", "Sampling", "Verdict",
    "generate", "speculative", "verify_block", "verify_token", "verify_traversal", "verify_typical",
]  # fmt: skip
