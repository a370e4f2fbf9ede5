"""On a real pretrained model, SmolLM2-135M-Instruct: the same tokens as transformers' greedy generate.

The folder is models/smollm2-135m-instruct, or what MTP_SMOLLM2 names; without it the tests are skipped.
"""

import os
from pathlib import Path

import pytest
import torch

from decoding import generate
from mtp import Network

FOLDER = Path(os.environ.get("MTP_SMOLLM2", "models/smollm2-135m-instruct"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason=f"no {FOLDER}"),
]
PROMPTS = {
    "text": "The three most important rules of writing are",
    "chat": [{"role": "user", "content": "Name three birds, and say where each of them lives."}],
}


@pytest.fixture(scope="module")
def smollm2():
    return Network.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(smollm2):
    """Prompt ids and transformers' own continuation of each prompt."""
    found = {}
    for name, prompt in PROMPTS.items():
        ids = generate(smollm2, prompt, max_new_tokens=0)[0].prompt_ids
        out = smollm2.trunk.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=128)
        found[name] = out[0, len(ids) :].tolist()
    return found


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", "early_exit", "layer_skip"])
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_are_those_of_transformers_generate(smollm2, expected, name, drafter):
    out = generate(smollm2, PROMPTS[name], drafter=drafter, num_draft_tokens=4, max_new_tokens=128)[0]
    assert out.token_ids == expected[name]
