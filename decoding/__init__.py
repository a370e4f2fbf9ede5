"""From networks to tokens, losslessly."""

from decoding.acceptance import Acceptance
from decoding.draft import Context, Draft, Drafter, Verdict
from decoding.generate import Completion, Emitted, generate
from decoding.sampling import Sampling
from decoding.verify import verify_block, verify_token

__all__ = [
    "Acceptance", "Completion", "Context", "Draft", "Drafter", "Emitted", "Sampling", "Verdict",
    "generate", "verify_block", "verify_token",
]  # fmt: skip
