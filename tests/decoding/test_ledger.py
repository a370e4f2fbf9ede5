"""The ledger against full enumeration, and against what decoding counts."""

import copy
import doctest
import functools
import itertools
from pathlib import Path

import pytest
import torch
from drafters import drafter_for
from exact import integrate, random_law
from rich.console import Console
from tiny import tiny_network
from torch.nn.functional import one_hot

import decoding.ledger
from decoding import Draft, Sampling, generate, verify_block, verify_token
from decoding.acceptance import total
from decoding.costs import measure
from decoding.draft import Autoregressive, chain, no_draft
from decoding.generate import build_drafter, drafter_names
from decoding.ledger import (
    ahead,
    expected,
    match,
    matches,
    ratio,
    ratios,
    survival_block,
    survival_coupled,
    survival_token,
)
from decoding.payoff import entry, ledger, listen, notes, shown
from decoding.replay import Text, Voice, replay
from decoding.sampling import RowSampling, law
from mtp import Network, UserError

RULES = {"token": (verify_token, survival_token), "block": (verify_block, survival_block)}
WARM = Sampling(temperature=1.0)
PROMPTS = [[1, 2, 3, 4], [5], [9, 8, 7, 1, 2, 3, 9, 8], [3, 3], [7, 8, 9, 7, 8, 9, 7, 8]]
NAMES = [name for name in drafter_names() if name != "none"]
SHIPPED = Path(__file__).resolve().parents[2] / "networks" / "pystdlib"


def test_the_worked_examples_hold():
    assert doctest.testmod(decoding.ledger, extraglobs={"torch": torch}).failed == 0


class Laws:
    """p[t] [V^t, V] after t tokens, q[t, j] [V^(t+j-1), V] at depth j after root t: both know all tokens."""

    def __init__(self, p, q):
        self.p, self.q = p, q
        self.length, self.size = len(p), p[0].shape[-1]
        self.texts = torch.tensor(list(itertools.product(range(self.size), repeat=self.length)))

    @classmethod
    def random(cls, seed, length=4, size=3):
        g = torch.Generator().manual_seed(seed)
        new = lambda tokens: random_law(g, [size**tokens], size, 1.5)  # noqa: E731
        roots = [(t, j) for t in range(length) for j in range(1, length - t + 1)]
        return cls([new(t) for t in range(length)], {(t, j): new(t + j - 1) for t, j in roots})

    def chance(self, text):
        """The target's probability of a whole text."""
        return self.of(text)[0].gather(1, text[:, None]).prod()

    def of(self, text):
        """p [T, V] and q [T, T, V] along one text, as the ledger wants them."""
        size, codes = len(text), self.codes(text)
        p = torch.stack([self.p[t][codes[t]] for t in range(size)])
        q = torch.zeros(size, size, self.size, dtype=torch.float64)
        for (t, j), table in self.q.items():
            if t + j <= size:
                q[j - 1, t] = table[codes[t + j - 1]]
        return p, q

    def codes(self, text):
        """The number of every beginning of a text among all of its length."""
        return [int(number(text[None, :t], self.size)) for t in range(len(text) + 1)]


def enumerated(laws, length, verify, *, worth="steps", eos=None):
    """Expected steps, or accepted tokens: all drafts, verdicts and next tokens summed, back from the end."""
    size, total = laws.size, laws.length
    later = {total: torch.zeros(size**total, dtype=torch.float64)}  # what is still to come after every text
    for t in reversed(range(total)):
        n = min(length, total - t - 1)
        tokens = torch.cartesian_prod(*[torch.arange(size)] * (t + n)).reshape(-1, t + n)
        code = [number(tokens[:, :k], size) for k in range(t + n + 1)]  # [R] of every beginning
        p = torch.stack([laws.p[t + k][code[t + k]] for k in range(n + 1)], dim=1)
        value, weight = torch.zeros(len(tokens), dtype=torch.float64), torch.ones(len(tokens)).double()
        chance, after = torch.ones(len(tokens), 1).double(), p
        if n:
            q = torch.stack([laws.q[t, j][code[t + j - 1]] for j in range(1, n + 1)], dim=1)
            weight = q.gather(2, tokens[:, t:, None])[..., 0].prod(1)
            outcomes = integrate(verify, p, Draft(tokens[:, t:], torch.arange(n).expand(len(tokens), n), q))
            chance, after = outcomes.chance, outcomes.law
        for end in range(n + 1):
            rest = later[t + end + 1].reshape(-1, size)[code[t + end]]
            ended = (tokens[:, t : t + end] == eos).any(1) if eos is not None else torch.tensor(False)
            rest = rest.masked_fill(ended[..., None], 0.0)
            value += chance[:, end] * ((1 if worth == "steps" else end) + (after[:, end] * rest).sum(1))
        later[t] = torch.zeros(size**t, dtype=torch.float64).index_add_(0, code[t], weight * value)
        if eos is not None and t:
            later[t][(tokens_of(t, size) == eos).any(1)] = 0.0
    return float(later[0])


def tokens_of(length, size):
    return torch.cartesian_prod(*[torch.arange(size)] * length).reshape(-1, length)


def number(tokens, size):
    place = size ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * place).sum(1)


def cut(text, eos):
    """A text up to its first EOS."""
    return text if eos is None or eos not in text.tolist() else text[: text.tolist().index(eos) + 1]


@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize("length", [1, 2, 3, 8])
@pytest.mark.parametrize("rule", RULES)
def test_expected_steps_equal_enumeration_of_all_texts_and_drafts(rule, length, eos):
    verify, survival = RULES[rule]
    laws, computed = Laws.random(length), 0.0
    for text in laws.texts:
        written = cut(text, eos)
        steps = expected(survival(ratios(written, *laws.of(written))), length).steps
        computed += float(laws.chance(text)) * steps
    assert computed == pytest.approx(enumerated(laws, length, verify, eos=eos), abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_expected_acceptance_equals_enumeration(rule):
    verify, survival = RULES[rule]
    laws = Laws.random(3)
    computed = 0.0
    for text in laws.texts:
        room = (torch.arange(4)[:, None] + torch.arange(4) < 3).double()  # the last token is nobody's draft
        found = expected(survival(ratios(text, *laws.of(text))), 2, room)
        computed += float(laws.chance(text)) * sum(found.accepted_at_depth)
    assert computed == pytest.approx(enumerated(laws, 2, verify, worth="accepted"), abs=1e-9)


def test_the_number_of_steps_has_the_variance_of_its_distribution():
    g = torch.Generator().manual_seed(0)
    survival = torch.rand(3, 7, generator=g, dtype=torch.float64).cumprod(0)
    found = expected(survival, 3)
    reach = torch.cat([torch.ones(1, 7), survival, torch.zeros(1, 7)])
    at = {0: 1.0}  # probability of standing after t tokens, once so many steps are made
    moments, made = torch.zeros(2, dtype=torch.float64), 0
    while at:
        made, after = made + 1, {}
        for t, mass in at.items():
            for i in range(4):
                end = min(t + i + 1, 7)
                after[end] = after.get(end, 0.0) + mass * float(reach[i, t] - reach[i + 1, t])
        moments += after.pop(7, 0.0) * torch.tensor([made, made**2], dtype=torch.float64)
        at = after
    assert found.steps == pytest.approx(float(moments[0]), abs=1e-12)
    assert found.variance == pytest.approx(float(moments[1] - moments[0] ** 2), abs=1e-12)


def test_averaging_over_positions_would_overstate_tau():
    """Two steps lead through the easy half of this text, but six through what they leave of the hard one."""
    survival = torch.tensor([[1.0] * 8 + [0.0] * 8] * 4)
    assert expected(survival, 4).steps == 2 + 6
    assert 1 + float(survival.sum(0).mean()) > 16 / expected(survival, 4).steps


def test_coupled_draws_agree_as_often_as_the_formula_says():
    g = torch.Generator().manual_seed(1)
    p, q = random_law(g, [], 5, 1.0), random_law(g, [], 5, 1.0)
    noise = -torch.rand(400_000, 5, generator=g, dtype=torch.float64).log()
    ours, theirs = (noise / p).argmin(1), (noise / q).argmin(1)
    chance = match(p.expand(5, -1), q.expand(5, -1), torch.arange(5))
    for token in range(5):
        drawn = ours == token
        agreed = (theirs[drawn] == token).double()
        assert float(agreed.mean()) == pytest.approx(
            float(chance[token]), abs=4 * float(agreed.std()) / len(agreed) ** 0.5
        )
    both = (1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum()  # design, rule 8
    assert float((p * chance).sum()) == pytest.approx(float(both), abs=1e-12)
    far = 1 - float(torch.minimum(p, q).sum())  # total variation
    assert (1 - far) / (1 + far) <= float(both) <= 1 - far


def test_laws_that_exclude_a_token_leave_no_nan():
    p, q = torch.tensor([[0.5, 0.5, 0.0]] * 3), torch.tensor([[0.0, 0.5, 0.5]] * 3)
    tokens = torch.arange(3)
    assert ratio(p, q, tokens).tolist() == [0.0, 1.0, torch.inf]
    assert match(p, q, tokens)[:2].tolist() == [0.0, 1 / 1.5]
    r = torch.tensor([[torch.inf], [0.0], [torch.inf]])
    assert survival_block(r)[:, 0].tolist() == survival_token(r)[:, 0].tolist() == [1.0, 0.0, 0.0]


def test_one_hot_laws_survive_while_they_agree_whatever_the_verifier():
    tokens = torch.tensor([1, 2, 0, 1])
    p, guess = one_hot(tokens, 3).double(), ahead(torch.tensor([1, 0, 0, 1]), 3)
    q = one_hot(guess, 3).double()
    found = [survival_token(ratios(tokens, p, q)), survival_block(ratios(tokens, p, q))]
    found.append(survival_coupled(matches(tokens, p, q)))
    assert all(each.tolist() == [[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]] for each in found)


# The replay: the same laws as teacher-forced passes give.


@pytest.fixture(scope="module")
def tiny() -> Network:
    return tiny_network(seed=2, vocab_size=3, layers=3).double()


@torch.no_grad()
def read_out(network, prompt, name, length):
    """Laws of all texts of `length` tokens from one pass of trunk and head over all of them."""
    texts = tokens_of(length, 3)
    rows = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], dim=1)
    trunk, head, root = network.trunk, network.heads[name], len(prompt) - 1
    settings = RowSampling.stack([WARM] * len(rows), 3, rows.device)
    out = trunk(rows, taps=head.taps)
    if name == "early_exit":
        hidden = list(head.readouts(trunk, rows, out.states))[head.exit_layer - 1].hidden
        said = {(t, j): hidden[:, root + t + j - 1] for t in range(length) for j in range(1, length - t + 1)}
    else:
        deeper = {"depth": length} if name == "sequential" else {}
        found = head.readouts(trunk, rows, out.states, **deeper)
        said = {(t, o.depth): o.hidden[:, root + t - 1] for o in found for t in range(length - o.depth + 1)}
    first = lambda values, known: values[:: 3 ** (length - known)]  # noqa: E731
    p = [first(law(out.logits, settings)[:, root + t], t) for t in range(length)]
    q = {
        (t, j): first(law(trunk.lm_head(h)[:, None], settings)[:, 0], t + j - 1) for (t, j), h in said.items()
    }
    return Laws(p, q)


def heard(network, texts, drafter, length, limit=None, sampling=WARM, prompt=(1, 2)):
    voice = Voice(drafter, length)
    replay(network, [Text(list(prompt), text, sampling, limit or len(text)) for text in texts], [voice])
    assert voice.refused is None
    return voice


@pytest.mark.parametrize("name", ["sequential", "parallel", "early_exit"])
def test_a_replayed_drafter_says_what_its_head_reads_out_and_enumeration_agrees(tiny, name):
    laws = read_out(tiny, [1, 2], name, 4)
    voice = heard(tiny, laws.texts.tolist(), build_drafter(tiny, name), 4, limit=8)
    assert voice.drawn
    for text, terms in zip(laws.texts, voice.terms, strict=True):
        p, q = laws.of(text)
        assert torch.allclose(terms.ratios, ratios(text, p, q), rtol=1e-9, atol=1e-12)
        assert torch.allclose(terms.matches, matches(text, p, q), rtol=1e-9, atol=1e-12)
    chances = torch.stack([laws.chance(text) for text in laws.texts])
    for rule, (verify, survival) in RULES.items():
        for length in (1, 3):
            steps = [expected(survival(terms.ratios), length, terms.tested).steps for terms in voice.terms]
            computed = float(chances @ torch.tensor(steps, dtype=torch.float64))
            assert computed == pytest.approx(enumerated(laws, length, verify), abs=1e-9), rule


def test_lookup_is_replayed_with_the_text_that_it_had_at_each_position(tiny):
    voice = heard(tiny, [[0, 1, 2, 0]], build_drafter(tiny, "ngram"), 2, limit=9)
    assert not voice.drawn
    assert voice.terms[0].tested.tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    assert (voice.terms[0].ratios > 0).tolist() == (voice.terms[0].tested > 0).tolist()
    assert voice.terms[0].heights == [0, 0, 2, 2]


# Against decoding: greedy counts are equal, sampled steps agree within their standard deviation.


def of_decoding(network, completions, sampling, limit, drafters, longest, eos=()):
    """The ledger of texts that some drafter wrote: they follow the target's law too."""
    texts = [Text(c.prompt_ids, c.token_ids, sampling, limit) for c in completions]
    options = {"longest": longest, "batch_size": len(texts), "eos_token_ids": eos, "timed": False}
    return ledger(network, texts, drafters, **options)


def builders(network, names):
    return {name: functools.partial(drafter_for, network, name) for name in names}


@pytest.mark.parametrize("end", ["eos", "length"])
def test_greedy_counts_are_those_of_decoding(network, end):
    """Steps, and what was tested and accepted at every depth, of every drafter."""
    plain = generate(network, PROMPTS, max_new_tokens=12)
    eos = tuple({completion.token_ids[6] for completion in plain}) if end == "eos" else ()
    plain = generate(network, PROMPTS, max_new_tokens=12, eos_token_ids=eos)
    assert {completion.finish_reason for completion in plain} == {end}
    book = of_decoding(network, plain, Sampling(), 12, builders(network, NAMES), 8, eos)
    for name, length in itertools.product(NAMES, (2, 8)):
        done = generate(
            network, PROMPTS, drafter=drafter_for(network, name), num_draft_tokens=length, max_new_tokens=12,
            eos_token_ids=eos,
        )  # fmt: skip
        same_counts(only(book, name, length), total([completion.acceptance for completion in done]))


def same_counts(found, counts):
    assert found.verifier == "greedy"
    assert found.deviation == 0
    assert (found.tokens, found.steps, found.alpha) == (counts.emitted, counts.steps, counts.alpha)
    depth = len(counts.tested_at_depth)
    assert found.tested_at_depth[:depth] == counts.tested_at_depth
    assert found.accepted_at_depth[:depth] == counts.accepted_at_depth
    assert not any(found.tested_at_depth[depth:])


def only(book, name, length, verifier="greedy"):
    key = (name, length, verifier)
    (found,) = [one for one in book.entries if (one.drafter, one.num_draft_tokens, one.verifier) == key]
    return found


def surprise(network, build, prompts, length, verifier, *, tokens=12, eos=(), sampling=WARM):
    """Steps that a run took, less those that the ledger expects for its texts, in standard deviations."""
    done = generate(
        network, prompts, drafter=build(), num_draft_tokens=length, verifier=verifier, sampling=sampling,
        max_new_tokens=tokens, eos_token_ids=eos,
    )  # fmt: skip
    book = of_decoding(network, done, sampling, tokens, {"it": build}, length, eos)
    found, counts = only(book, "it", length, verifier), total([completion.acceptance for completion in done])
    assert found.tokens == counts.emitted
    if found.deviation == 0:
        assert found.steps == counts.steps
        return 0.0
    return (counts.steps - found.steps) / found.deviation


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_sampled_steps_are_within_their_deviation(network, name, verifier):
    build = functools.partial(drafter_for, network, name)
    assert abs(surprise(network, build, PROMPTS * 6, 3, verifier, eos=(7,))) < 4


def test_settings_of_every_kind_enter_the_laws(network):
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.95, repetition_penalty=1.3, min_new_tokens=6)
    build = functools.partial(drafter_for, network, "early_exit")
    assert abs(surprise(network, build, PROMPTS * 8, 4, "block", eos=(3, 9), sampling=sampling)) < 4


class Wrapped:
    """A drafter with another `propose` or `extend`."""

    def __init__(self, drafter, propose=None, extend=None):
        self.taps, self.reset, self.select = drafter.taps, drafter.reset, drafter.select
        self.propose = propose or drafter.propose
        self.extend = extend or drafter.extend


class Sharp:
    """A context whose draws are colder than the law that they declare."""

    takes_best = False

    def __init__(self, context):
        self.context, self.room, self.law = context, context.room, context.law

    def draw(self, law, depth, node):
        token, q = self.context.draw(law**4 / (law**4).sum(-1, keepdim=True), depth, node)
        return token, None if q is None else law


def test_a_wrong_q_shows():
    network = tiny_network(seed=3, vocab_size=8, layers=3)

    def lying():
        drafter = build_drafter(network, "early_exit")
        return Wrapped(drafter, propose=lambda root, n, context: drafter.propose(root, n, Sharp(context)))

    honest = functools.partial(build_drafter, network, "early_exit")
    assert abs(surprise(network, honest, [[1, 2]] * 40, 4, "token")) < 4
    assert abs(surprise(network, lying, [[1, 2]] * 300, 4, "token")) > 5


def test_a_drafter_that_misses_accepted_tokens_shows():
    network = tiny_network(seed=3, vocab_size=8, layers=3)
    near = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in near.trunk.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    honest = functools.partial(build_drafter, network, "draft_model", model=near)

    def forgetful():
        drafter = honest()

        def extend(tokens, states, keep):
            prompt = keep.shape[1] > 5
            drafter.extend(tokens, states, keep & (prompt | (torch.arange(keep.shape[1]) == 0)))

        return Wrapped(drafter, extend=extend)

    prompts = [[1, 2, 3, 4, 5, 6, 7, 0]] * 240
    assert abs(surprise(network, honest, prompts[:40], 4, "token")) < 4
    assert abs(surprise(network, forgetful, prompts, 4, "token")) > 5


def of_texts(network, build, sampling=WARM, longest=3):
    plain = generate(network, PROMPTS, sampling=sampling, max_new_tokens=9)
    return of_decoding(network, plain, sampling, 9, {"it": build}, longest)


def test_a_law_that_is_not_drawn_from_is_refused(network):
    def careless(root, n, context):
        law = torch.full((len(root), 64), 1 / 64)
        return chain([root, root], [law, law], context.room)

    book = of_texts(network, lambda: Wrapped(Autoregressive(), propose=careless))
    assert not book.entries
    assert "did not draw" in book.left_out["it"]


def test_siblings_that_are_drawn_are_refused(network):
    def forked(root, n, context):
        law = torch.full((len(root), 64), 1 / 64)
        draft = chain([root, root], [law, law], context.room)
        return Draft(draft.tokens, torch.zeros_like(draft.parents), draft.q)

    assert "siblings" in of_texts(network, lambda: Wrapped(Autoregressive(), propose=forked)).left_out["it"]


def test_deterministic_siblings_are_counted_as_decoding_counts_them(network):
    """Three guesses for the next token and one for the token after the second of them."""

    def forked(root, n, context):
        first = (root[:, None] * torch.tensor([3, 5, 7]) + 1) % 64
        tokens = torch.cat([first, (first[:, 1:2] * 11) % 64], dim=1)
        used = torch.tensor(context.room)[:, None] >= torch.tensor([1, 1, 1, 2])
        return Draft(tokens, torch.where(used, torch.tensor([0, 0, 0, 2]), -1)) if n > 1 else no_draft(root)

    build = lambda: Wrapped(Autoregressive(), propose=forked)  # noqa: E731
    done = generate(
        network, PROMPTS * 8, drafter=build(), num_draft_tokens=2, sampling=WARM, max_new_tokens=12
    )
    book = of_decoding(network, done, WARM, 12, {"it": build}, 2)
    found, counts = only(book, "it", 2, "token"), total([completion.acceptance for completion in done])
    assert (found.steps, found.tested_at_depth) == (counts.steps, counts.tested_at_depth)
    assert found.accepted_at_depth == counts.accepted_at_depth
    assert counts.accepted_at_depth[0] > 0
    assert {one.verifier for one in book.entries} == {"token", "coupled"}  # block is for chains
    assert only(book, "it", 1, "token").tau == 1


def test_a_drafter_that_does_not_draw_is_asked_for_every_length(network):
    def fickle(root, n, context):
        return chain([root + n] * n, [None] * n, context.room)

    texts = [Text([1], [4, 5], Sampling(), 8)]
    book = ledger(network, texts, {"it": lambda: Wrapped(Autoregressive(), propose=fickle)}, timed=False)
    assert [one.steps for one in book.entries] == [2, 2, 1, 2, 2, 2, 2, 2]  # 1 + 3 is 4


def test_the_table_names_what_pays_and_what_was_left_out(network):
    def missing():
        raise UserError("the network has no such head")

    plain = generate(network, PROMPTS[:2], sampling=WARM, max_new_tokens=6)
    texts = [Text(c.prompt_ids, c.token_ids, WARM, 6) for c in plain]
    drafters = builders(network, ["ngram", "early_exit"]) | {"medusa": missing}
    book = ledger(network, texts, drafters, longest=3)
    assert len(book.entries) == 2 * 3 * 3
    assert all(one.speedup > 0 and 1 <= one.tau <= 4 for one in book.entries)
    assert book.best.speedup == max(one.speedup for one in book.entries)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shown(book))
    text = console.export_text()
    assert all(
        word in text for word in ("early_exit", "coupled", f"{book.entries[0].tau:.2f}", "no such head")
    )
    assert f"{book.best.num_draft_tokens} draft tokens" in notes(book)[0]


def test_a_text_without_tokens_has_no_entries(network):
    book = ledger(network, [Text([1], [], WARM, 0)], builders(network, ["ngram"]))
    assert not book.entries
    assert book.best is None
    assert notes(book) == []


def test_timed_steps_reject_everything_and_fill_lookups_up(network):
    texts = [Text([1, 2, 3], [4], WARM, 9), Text([5], [6], Sampling(), 9)]
    for name, lengths in (("ngram", [1, 3]), ("parallel", [2]), ("early_exit", [3])):
        costs = measure(network, texts, drafter_for(network, name), "block", lengths)
        assert sorted(costs.times) == lengths
    assert sorted(measure(network, texts, Autoregressive(), "token", [0]).times) == [0]


def test_a_timed_step_scores_just_the_tokens_of_its_length(network, monkeypatch):
    widths = []
    forward = type(network.trunk).forward
    monkeypatch.setattr(
        type(network.trunk),
        "forward",
        lambda trunk, tokens, **options: widths.append(tokens.shape[1]) or forward(trunk, tokens, **options),
    )
    texts = [Text([1, 2, 3], [4], Sampling(), 9)]
    for drafter in (Autoregressive(), drafter_for(network, "ngram"), drafter_for(network, "parallel")):
        widths.clear()
        measure(network, texts, drafter, "token", [0, 1, 3], calls=2)
        assert widths == [2, *[1, 2, 4] * 3]  # the prompt first; one step of each length warms up


# The shipped network.


@pytest.fixture(scope="module")
def shipped() -> Network:
    return Network.from_pretrained(SHIPPED, dtype=torch.float32)


CODE = ["def __init__(self, ", "import os\n\n\ndef walk(", "class Stack:\n    def", "    for line in "]


@pytest.mark.parametrize("name", ["sequential", "early_exit"])
def test_the_shipped_network_decodes_as_expected(shipped, name):
    build = functools.partial(build_drafter, shipped, name)
    settings = {"num_draft_tokens": 3, "max_new_tokens": 12}
    done = generate(shipped, CODE, drafter=build(), **settings)
    book = of_decoding(shipped, done, Sampling(), 12, {name: build}, 3)
    same_counts(only(book, name, 3), total([completion.acceptance for completion in done]))
    assert abs(surprise(shipped, build, CODE, 3, "block", eos=(1,))) < 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_length_and_verifier_decodes_as_expected(shipped, name):
    """Greedily and sampled, lengths 1 to 8, 16 held-out prompts of 64 tokens with 48 new ones."""
    from training.prompts import held_out_documents, prompts

    if name not in shipped.heads and name in ("medusa", "eagle"):
        pytest.skip("the shipped network has no such head")
    texts = [one.token_ids for one in prompts(held_out_documents(), 16, shipped.tokenizer, 64)]
    for counts, found in compared(shipped, name, texts, 48, range(1, 9)):
        error = abs(counts.steps - found.steps)
        print(name, found.num_draft_tokens, found.verifier, f"{counts.tau:.4f} {found.tau:.4f}", end=" ")
        print(f"{error / found.deviation:.2f}" if found.deviation > 0 else f"{error:.1e}")
        assert error <= 4 * found.deviation + 1e-6, found


def compared(network, name, prompts, tokens, lengths=(1, 2, 4, 8)):
    """What runs of one drafter counted and the ledger's entry for each of them, greedy and sampled."""
    options = {"model": SHIPPED.with_name("pystdlib-draft")} if name == "draft_model" else {}
    build = functools.partial(build_drafter, network, name, **options)
    for sampling, rules in ((Sampling(), ["greedy"]), (WARM, ["token", "block", "coupled"])):
        runs = [(rule, length) for rule in rules for length in lengths]
        done = [
            generate(
                network, prompts, drafter=build(), num_draft_tokens=length, max_new_tokens=tokens,
                verifier=rule.replace("greedy", "token"), sampling=sampling, eos_token_ids=1,
            )
            for rule, length in runs
        ]  # fmt: skip
        texts = [Text(one.prompt_ids, one.token_ids, sampling, tokens) for run in done for one in run]
        heard, _ = listen(network, [texts], {name: build}, max(lengths), (1,))
        for at, ((rule, length), run) in enumerate(zip(runs, done, strict=True)):
            own = heard[name][length][at * len(prompts) : (at + 1) * len(prompts)]
            yield total([one.acceptance for one in run]), entry(name, length, rule, own, None)
