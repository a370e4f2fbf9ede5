"""From networks to tokens, losslessly."""

from decoding.acceptance import Acceptance
from decoding.draft import Context, Draft, Drafter, Verdict
from decoding.generate import generate
from decoding.rows import Completion, Emitted
from decoding.sampling import Sampling
from decoding.verify import verify_block, verify_token, verify_typical

__all__ = [
    "Acceptance", "Completion", "Context", "Draft", "Drafter", "Emitted", "Sampling", "Verdict",
    "generate", "verify_block", "verify_token", "verify_typical",
]  # fmt: skip
