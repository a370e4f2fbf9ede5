"""A separate draft model: its own cache keeps what became true, and only shared ids are ever drafted."""

import copy
import itertools

import pytest
import torch
from drafters import tiny_draft
from laws import check_law
from tiny import tiny_network, tiny_trunk
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from decoding import Sampling, generate
from decoding.generate import build_drafter
from mtp import Network, UserError

PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8], [3, 3]]
WARM = Sampling(temperature=0.9)


def ids(completions):
    return [completion.token_ids for completion in completions]


@torch.no_grad()
def noisy(network, scale):
    """A draft model that is the network's own trunk, each weight blurred: perfect at 0."""
    trunk = copy.deepcopy(network.trunk)
    generator = torch.Generator().manual_seed(4)
    for parameter in trunk.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(scale * parameter.std() * noise if parameter.dim() > 1 else 0.0)
    return Network(trunk)


class Watching:
    """Keeps every draft, what went into it, and the positions that the draft model ran."""

    def __init__(self, drafter):
        self.drafter, self.taps = drafter, ()
        self.drafts, self.laws, self.ran = [], [], []
        run = drafter.trunk.run

        def counted(hidden, *args, **options):
            self.ran[-1] += hidden.shape[1]
            return run(hidden, *args, **options)

        drafter.trunk.run = counted

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, root, num_draft_tokens, context):
        raw = context.law
        texts = [[*text, token] for text, token in zip(self.drafter.texts, root.tolist(), strict=True)]

        def law(logits, path):
            self.laws += zip(texts, path.tolist(), context.room, logits.softmax(-1), strict=True)
            return raw(logits, path)

        context.law = law
        self.ran.append(0)
        draft = self.drafter.propose(root, num_draft_tokens, context)
        self.drafts.append((texts, draft))
        return draft


@pytest.mark.parametrize(("scale", "low", "high"), [(0.0, 1.0, 1.0), (0.15, 0.1, 0.9), (2.0, 0.0, 0.1)])
def test_draft_models_good_half_bad_and_bad_give_plain_decodings_tokens(network, scale, low, high):
    drafter = build_drafter(network, "draft_model", model=noisy(network, scale))
    out = generate(network, PROMPTS, drafter=drafter, num_draft_tokens=5, max_new_tokens=30)
    assert ids(out) == ids(generate(network, PROMPTS, max_new_tokens=30))
    assert low <= sum(o.acceptance.accepted for o in out) / sum(o.acceptance.tested for o in out) <= high


@torch.no_grad()
@pytest.mark.parametrize("scale", [0.0, 0.15, 2.0])
def test_every_law_is_that_of_a_pass_over_the_whole_text(network, scale):
    watching = Watching(build_drafter(network, "draft_model", model=noisy(network, scale)))
    generate(network, PROMPTS, drafter=watching, sampling=WARM, max_new_tokens=12)
    assert len(watching.laws) > 30
    for text, path, room, law in watching.laws:
        if len(path) < room:
            whole = watching.trunk(torch.tensor([text + path])).logits[0, -1].softmax(-1)
            torch.testing.assert_close(law, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 0.15, 2.0])
def test_accepted_tokens_are_not_run_again(network, scale):
    """A step runs the root and three of four drafts, and before them only a fourth that was accepted."""
    watching = Watching(build_drafter(network, "draft_model", model=noisy(network, scale)))
    generate(network, PROMPTS[0], drafter=watching, num_draft_tokens=4, max_new_tokens=40)
    lengths = [len(texts[0]) for texts, draft in watching.drafts if draft.tokens.shape[1] == 4]
    assert len(lengths) > 5
    assert watching.ran[0] == len(PROMPTS[0]) + 3
    emitted = [later - earlier for earlier, later in itertools.pairwise(lengths)]
    assert watching.ran[1 : len(lengths)] == [5 if count == 5 else 4 for count in emitted]


def test_a_draft_model_with_a_shorter_context_stops_drafting_there(network):
    short = Network(tiny_trunk(0, context=12))
    watching = Watching(build_drafter(network, "draft_model", model=short))
    prompts = [[1, 2, 3], [4] * 9, [5, 6] * 10]
    out = generate(network, prompts, drafter=watching, num_draft_tokens=4, max_new_tokens=20)
    assert ids(out) == ids(generate(network, prompts, max_new_tokens=20))
    used = [
        (len(text), int((parents >= 0).sum()))
        for texts, draft in watching.drafts
        for text, parents in zip(texts, draft.parents, strict=True)
    ]
    assert any(count == 4 for _, count in used)
    assert all(length - 1 + count <= 12 for length, count in used if count)
    assert {count for length, count in used if length > 12} == {0}


def test_a_draft_model_keeps_the_law():
    network = tiny_network(seed=2, vocab_size=6, layers=2)
    drafter = build_drafter(network, "draft_model", model=noisy(network, 0.3))
    assert 0.4 < check_law(network, [1, 2, 3], drafter=drafter, num_draft_tokens=3, verifier="block") < 0.99


def test_coupled_text_is_that_of_plain_decoding(network):
    options = {"verifier": "coupled", "sampling": WARM, "max_new_tokens": 25, "seed": 3}
    plain = ids(generate(network, PROMPTS, **options))
    for count in (1, 4):
        drafter = build_drafter(network, "draft_model", model=noisy(network, 0.15))
        assert ids(generate(network, PROMPTS, drafter=drafter, num_draft_tokens=count, **options)) == plain


def test_a_seed_repeats_in_any_company(network):
    drafter = build_drafter(network, "draft_model", model=noisy(network, 0.15))
    options = {"drafter": drafter, "sampling": WARM, "max_new_tokens": 15}
    together = generate(network, PROMPTS, seed=[1, 7, 2, 5], **options)
    for prompt, seed, row in zip(PROMPTS, [1, 7, 2, 5], together, strict=True):
        assert generate(network, prompt, seed=seed, **options)[0].token_ids == row.token_ids


def test_a_folder_is_loaded_in_the_networks_dtype(network, tmp_path):
    tiny_draft(network).save_pretrained(tmp_path / "draft", dtype=torch.bfloat16)
    drafter = build_drafter(network, "draft_model", model=tmp_path / "draft")
    assert drafter.trunk.dtype == network.trunk.dtype
    out = generate(network, PROMPTS, drafter=drafter, max_new_tokens=10)
    assert ids(out) == ids(generate(network, PROMPTS, max_new_tokens=10))


def worded(size, padded=None, swapped=(), seed=0):
    """A random network of `size` words, its matrices padded; unmasked, the padding would win every draft."""
    names = [f"word{i}" for i in range(size)]
    for i in swapped:
        names[i] = f"word{sum(swapped) - i}"
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    trunk = tiny_trunk(seed, vocab_size=padded or size, context=64)
    with torch.no_grad():
        trunk.model.lm_head.weight[size:] *= 50.0
    return Network(trunk, {}, PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    ("target", "draft", "named"),
    [
        ({"size": 259}, {"size": 256}, "259 tokens, the draft model 256"),
        ({"size": 256}, {"size": 259}, "256 tokens, the draft model 259"),
        (
            {"size": 259},
            {"size": 259, "swapped": (30, 70)},
            "token 30 is 'word30' .* and 'word70' in the draft",
        ),
        ({"size": 259}, {"size": 256, "padded": 259}, "259 tokens, the draft model 256"),
    ],
)
def test_another_vocabulary_is_refused(target, draft, named):
    with pytest.raises(UserError, match=named):
        build_drafter(worded(**target), "draft_model", model=worded(**draft))


def test_without_tokenizers_the_sizes_must_agree(network):
    with pytest.raises(UserError, match="64 tokens, the draft model 60"):
        build_drafter(network, "draft_model", model=Network(tiny_trunk(vocab_size=60)))


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("ours", "theirs"), [(259, 320), (320, 259), (320, 320)])
def test_padding_is_never_drafted(ours, theirs, sampling):
    target = worded(259, padded=ours)
    with torch.no_grad():
        target.trunk.model.lm_head.weight[259:] = 0.0
    watching = Watching(build_drafter(target, "draft_model", model=worded(259, padded=theirs, seed=1)))
    out = generate(target, PROMPTS, drafter=watching, sampling=sampling, max_new_tokens=15, eos_token_ids=[])
    assert max(int(draft.tokens.max()) for _, draft in watching.drafts if draft.tokens.numel()) < 259
    if sampling.temperature == 0:
        assert ids(out) == ids(generate(target, PROMPTS, max_new_tokens=15, eos_token_ids=[]))


def test_an_id_that_the_draft_model_cannot_read_is_no_obstacle():
    target = worded(259, padded=320)
    drafter = build_drafter(target, "draft_model", model=worded(259, seed=1))
    prompt = [300, 1, 319, 2]
    out = generate(target, [prompt], drafter=drafter, max_new_tokens=8, eos_token_ids=[])
    assert ids(out) == ids(generate(target, [prompt], max_new_tokens=8, eos_token_ids=[]))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "drafter.model is missing"),
        ({"model": None}, "drafter.model is missing"),
        ({"model": 3}, "drafter.model is 3"),
        ({"model": "no/such/folder"}, "drafter.model: no/such/folder is not a network folder"),
    ],
)
def test_a_missing_model_is_named(network, options, named):
    with pytest.raises(UserError, match=named):
        build_drafter(network, "draft_model", **options)
