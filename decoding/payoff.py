"""Which drafter, draft length and verifier would pay on this machine, before a speculative step is taken."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text as Line

from decoding.costs import measure
from decoding.draft import Autoregressive, Drafter
from decoding.ledger import Expected, expected, survival_block, survival_coupled, survival_token
from decoding.replay import Terms, Text, Voice, replay
from mtp import Network, UserError

LONGEST = 8
TIMED = (1, 4)  # draft lengths, and the longest; straight lines between them
SURVIVAL = {
    "greedy": lambda terms: survival_token(terms.ratios),
    "token": lambda terms: survival_token(terms.ratios),
    "block": lambda terms: survival_block(terms.ratios),
    "coupled": lambda terms: survival_coupled(terms.matches),
}
Build = Callable[[], Drafter]
Heard = dict[int, list[Terms]]  # by draft length, one entry a text


@dataclass(frozen=True, slots=True)
class Entry:
    """What one drafter, length and verifier give on the texts, in expectation over their draws."""

    drafter: str
    num_draft_tokens: int
    verifier: str  # "greedy" where no row samples: all verifiers agree then
    tokens: int
    steps: float
    deviation: float  # standard deviation of the steps, the texts being what they are
    tau: float
    alpha: float | None  # None where nothing was drafted
    tested_at_depth: list[float]
    accepted_at_depth: list[float]
    speedup: float | None  # over plain decoding, prefill left out; None where nothing was timed


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries, and the drafters that have none with the reason why."""

    entries: list[Entry]
    left_out: dict[str, str]

    @property
    def best(self) -> Entry | None:
        """The fastest entry, be it slower than plain decoding."""
        timed = [entry for entry in self.entries if entry.speedup is not None]
        return max(timed, key=lambda entry: entry.speedup or 0.0, default=None)


def ledger(
    network: Network,
    texts: Sequence[Text],
    drafters: Mapping[str, Build],
    *,
    longest: int = LONGEST,
    batch_size: int = 1,
    eos_token_ids: tuple[int, ...] = (),
    timed: bool = True,
) -> Ledger:
    """Replay texts that plain decoding wrote to all drafters; what follows for lengths 1 ... longest.

    drafters: by name what builds one. It is called for every replay, so that no drafter has seen the texts
    before, and for the times. Texts are replayed batch_size at a time, and the first of these batches is what
    is timed. A drafter that cannot be built or computed is left out.
    """
    texts = [text for text in texts if text.token_ids]
    batches = [texts[at : at + batch_size] for at in range(0, len(texts), batch_size)]
    heard, left_out = listen(network, batches, drafters, longest, eos_token_ids)
    sampled = any(text.sampling.temperature > 0 for text in texts)
    entries: list[Entry] = []
    for verifier in ("token", "block", "coupled") if sampled else ("greedy",):
        for name, by_length in heard.items() if texts else ():
            if verifier == "block" and not all(terms.chains for terms in by_length[longest]):
                continue  # it is a rule for chains
            prices = price(network, batches[0], drafters[name], verifier, longest) if timed else None
            entries += [entry(name, n, verifier, terms, prices) for n, terms in sorted(by_length.items())]
    return Ledger(entries, left_out)


def listen(
    network: Network,
    batches: list[list[Text]],
    drafters: Mapping[str, Build],
    longest: int,
    eos: tuple[int, ...],
) -> tuple[dict[str, Heard], dict[str, str]]:
    """All drafters' terms by length, and why some have none.

    Those that draw are asked once, for the longest draft; then the others for every length.
    """
    left_out: dict[str, str] = {}
    voices: dict[str, Voice] = {}
    for name, build in drafters.items():
        try:
            voices[name] = Voice(build(), longest)
        except UserError as error:
            left_out[name] = str(error)
    for batch in batches:
        replay(network, batch, list(voices.values()), eos)
    left_out |= {name: voice.refused for name, voice in voices.items() if voice.refused}
    heard = {name: dict.fromkeys(range(1, longest + 1), voice.terms) for name, voice in voices.items()}
    again = {
        (name, n): Voice(drafters[name](), n)
        for name, voice in voices.items()
        for n in range(1, longest)
        if not voice.drawn and name not in left_out
    }
    for batch in batches if again else ():
        replay(network, batch, list(again.values()), eos)
    for (name, n), voice in again.items():
        heard[name][n] = voice.terms
    return {name: by_length for name, by_length in heard.items() if name not in left_out}, left_out


def entry(name: str, length: int, verifier: str, texts: list[Terms], prices: list[float] | None) -> Entry:
    """The sum over texts; prices[n] is the time of a step that drafts n tokens in plain decoding's steps."""
    found = [expected(SURVIVAL[verifier](terms), length, terms.tested) for terms in texts]
    tokens, steps = sum(len(terms.heights) for terms in texts), sum(one.steps for one in found)
    tested = [sum(column) for column in zip(*(one.tested_at_depth for one in found), strict=True)]
    accepted = [sum(column) for column in zip(*(one.accepted_at_depth for one in found), strict=True)]
    return Entry(
        drafter=name,
        num_draft_tokens=length,
        verifier=verifier,
        tokens=tokens,
        steps=steps,
        deviation=sum(one.variance for one in found) ** 0.5,
        tau=tokens / steps,
        alpha=sum(accepted) / sum(tested) if sum(tested) else None,
        tested_at_depth=tested,
        accepted_at_depth=accepted,
        speedup=None if prices is None else tokens / duration(found, texts, length, prices),
    )


def duration(found: list[Expected], texts: list[Terms], length: int, prices: list[float]) -> float:
    """Expected time of all steps, each by what it drafts."""
    return sum(
        visit * prices[min(height, length)]
        for one, terms in zip(found, texts, strict=True)
        for visit, height in zip(one.visits, terms.heights, strict=True)
    )


def price(network: Network, batch: list[Text], build: Build, verifier: str, longest: int) -> list[float]:
    """What steps cost that draft 0 ... longest tokens of this batch, plain decoding's being 1."""
    rule = "token" if verifier == "greedy" else verifier
    timed = sorted({length for length in TIMED if length < longest} | {longest})
    plain = measure(network, batch, Autoregressive(), "token", [0])(0)
    costs = measure(network, batch, build(), rule, timed)
    costs.add(0, plain)
    return [costs(n) / plain for n in range(longest + 1)]


def shown(ledger: Ledger) -> Group:
    """For a terminal: τ of every drafter, verifier and length, and below it the speed in plain decoding's."""
    lengths = sorted({entry.num_draft_tokens for entry in ledger.entries})
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="expected τ, and speed next to plain decoding"
    )
    for heading in ("drafter", "verifier", *map(str, lengths)):
        table.add_column(heading, justify="right" if heading.isdigit() else "left", no_wrap=True)
    cells: dict[tuple[str, str], list[str]] = {}
    for one in ledger.entries:
        cells.setdefault((one.drafter, one.verifier), []).append(cell(one, ledger.best))
    for (drafter, verifier), row in sorted(cells.items(), key=lambda item: item[0][0]):
        table.add_row(drafter, verifier, *row)
    return Group(table, *(Line(line) for line in notes(ledger)))


def cell(entry: Entry, best: Entry | None) -> str:
    """Two lines; in bold green the best one if it is faster than plain decoding."""
    if entry.speedup is None:
        return f"{entry.tau:.2f}"
    text = f"{entry.tau:.2f}\n×{entry.speedup:.2f}"
    return f"[bold green]{text}[/]" if entry is best and entry.speedup > 1 else text


def notes(ledger: Ledger) -> list[str]:
    """The best entry in words, and what could not be computed."""
    lines, best = [], ledger.best
    if best is not None and best.speedup is not None:
        rule = "" if best.verifier == "greedy" else f", {best.verifier} verification"
        lines.append(
            f"{'fastest' if best.speedup > 1 else 'plain decoding is fastest; next'}: {best.drafter} with "
            f"{best.num_draft_tokens} draft tokens{rule}, τ {best.tau:.2f}, speed ×{best.speedup:.2f}"
        )
    return lines + [f"left out: {name} ({reason})" for name, reason in ledger.left_out.items()]
