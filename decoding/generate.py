"""`generate`: what a user says, checked and laid out row by row, then run by the loop."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import decoding.drafters
from decoding.costs import calibrated, known
from decoding.draft import Drafter
from decoding.draft_length import AutoLength, FixedLength, Policy
from decoding.loop import VERIFIERS, Trace, decode
from decoding.prompts import PromptLike
from decoding.rows import Completion, Emitted, Row, new_row
from decoding.sampling import Sampling
from mtp import Network, UserError
from mtp.errors import check_whole

GREEDY = Sampling()


def generate(
    network: Network,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    drafter: str | Drafter = "none",
    num_draft_tokens: int | str = 4,
    verifier: str = "token",
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    max_new_tokens: int | Sequence[int] = 128,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] | Sequence[Sequence[str]] = (),
    eos_token_ids: int | Sequence[int] | None = None,
    logprobs: bool = False,
    observe: Callable[[Emitted], None] | None = None,
    trace: Trace | None = None,
) -> list[Completion]:
    """Decode one prompt or many together; the output is the trunk's own, whatever the drafter.

    prompts: text, token ids or chat messages, one or a list of them. drafter: a name in decoding.drafters or
    a Drafter. num_draft_tokens: a number or "auto". sampling, max_new_tokens, stop: one for all or one a row.
    Row r of an integer seed s has seed s + r. eos_token_ids: None is the network's own, () none. observe is
    called with what every step emitted, trace with all that it came from. UserError for what a user got
    wrong.
    """
    if num_draft_tokens != "auto":
        check_whole("num_draft_tokens", num_draft_tokens, 0)
    check_verifier(verifier)
    many = as_list(prompts)
    if not many:
        raise UserError("prompts is an empty list; at least one prompt is needed")
    eos, device = check_eos(network, eos_token_ids), network.trunk.device
    columns = (
        many,
        per_row("sampling", sampling, len(many)),
        per_row("seed", seed, len(many), next_seed),
        per_row("max_new_tokens", max_new_tokens, len(many)),
        per_row("stop", stop, len(many)) if is_nested(stop) else [stop] * len(many),
    )
    rows = [
        new_row(network, device, eos, index, *values)
        for index, values in enumerate(zip(*columns, strict=True))
    ]
    for row in rows:
        row.logprobs = [] if logprobs else None
    built = build_drafter(network, drafter) if isinstance(drafter, str) else drafter
    length = policy(num_draft_tokens, network, rows, built, verifier, asked=drafter)
    decode(network, rows, built, length, VERIFIERS[verifier], observe, trace)
    return [row.completion() for row in rows]


def policy(
    num_draft_tokens: int | str,
    network: Network,
    rows: list[Row],
    drafter: Drafter,
    verifier: str,
    asked: str | Drafter,
) -> Policy:
    """A number, or "auto": by what steps cost here with this drafter, measured once, for so many rows, and by
    what drafts of the one that was `asked` for, by name or not, have come to."""
    going = [row for row in rows if row.output.finish_reason is None]
    if isinstance(num_draft_tokens, int) or not going:
        return FixedLength(num_draft_tokens if isinstance(num_draft_tokens, int) else 0)
    found = known(network, asked)
    return AutoLength(calibrated(network, going, drafter, verifier, found), found.experience)


def build_drafter(network: Network, name: str, **options: Any) -> Drafter:
    """A name is a module: "sequential" is built by decoding.drafters.sequential.build."""
    if name not in drafter_names():
        raise UserError(f"drafter={name!r} is not one of {', '.join(drafter_names())}")
    return importlib.import_module(f"decoding.drafters.{name}").build(network, **options)


def drafter_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(decoding.drafters.__path__))


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> many: a text, a list of ids and a list of messages are one prompt each."""
    single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], (int, dict)))
    return [prompts] if single else list(prompts)


def is_nested(values: Any) -> bool:
    """Whether a list holds lists: one a row."""
    return not isinstance(values, str) and any(isinstance(value, (list, tuple)) for value in values)


def per_row(
    name: str, value: Any, count: int, spread: Callable[[Any, int], Any] = lambda v, _: v
) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [spread(value, row) for row in range(count)]
    if len(value) != count:
        raise UserError(f"{name}: {len(value)} values for {count} prompts; give one for all or one for each")
    return list(value)


def check_verifier(name: object) -> None:
    if not isinstance(name, str) or name not in VERIFIERS:
        raise UserError(f"verifier={name!r} is not one of {', '.join(VERIFIERS)}")


def next_seed(seed: Any, row: int) -> Any:
    return seed + row if isinstance(seed, int) else seed  # anything else is refused by its row


def check_eos(network: Network, eos_token_ids: Any) -> tuple[int, ...]:
    """The ids at which a row ends: the network's own where None is given."""
    if eos_token_ids is None:
        generation = getattr(network.trunk.model, "generation_config", None)
        eos_token_ids = getattr(generation, "eos_token_id", None)
        if eos_token_ids is None:
            eos_token_ids = network.trunk.config.eos_token_id
    if eos_token_ids is None:
        return ()
    ids = eos_token_ids if isinstance(eos_token_ids, (list, tuple)) else [eos_token_ids]
    for token in ids:
        check_whole("eos_token_ids", token, 0)
    return tuple(ids)
