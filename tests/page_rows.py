"""Made-up rows of results and an example text, as an ablation writes them, for tests of its report."""

import random
from typing import Any

FAMILIES = {  # drafter: share accepted at depth 1, what is left of it a depth on, c, change of the loss
    "sequential": (0.72, 0.98, 0.32, 0.005),
    "parallel": (0.66, 0.80, 0.18, 0.015),
    "early_exit": (0.70, 0.97, 0.62, 0.110),
    "ngram": (0.35, 1.02, 0.01, None),
    "draft_model": (0.60, 0.97, 0.40, None),
}
NETWORKS = {
    "parallel": ("parallel", "ngram", "draft_model"),
    "sequential": ("sequential", "ngram", "draft_model"),
    "sequential_repeated": ("sequential",),
    "early_exit": ("early_exit", "ngram"),
    "early_exit_dropout": ("early_exit",),
}


def synthetic_rows(
    settings: tuple[str, ...] = ("equal_parameters", "frozen_trunk"), seeds: int = 3
) -> list[dict[str, Any]]:
    rows = [
        synthetic_row(setting, network, drafter, seed)
        for setting in settings
        for network, drafters in NETWORKS.items()
        for drafter in drafters
        for seed in range(seeds)
    ]
    if "joint" not in settings:
        rows += [synthetic_row("joint", "joint", drafter, 0) for drafter in FAMILIES]
    return rows


def synthetic_row(setting: str, network: str, drafter: str, seed: int) -> dict[str, Any]:
    dice = random.Random(f"{setting} {network} {drafter} {seed}")
    first, decay, cost, harm = FAMILIES[drafter]
    first += dice.uniform(-0.02, 0.02) - 0.04 * (network != drafter)
    frozen = setting == "frozen_trunk"
    alone = 2.4 + 0.02 * dice.random()
    change = 0.0 if frozen or harm is None else harm + dice.uniform(-0.01, 0.01)
    modes = {mode: ledger(first + bonus, decay, drafter) for mode, bonus in MODES.items()}
    reached = modes["greedy"][3]["tau"]
    speed = reached / (1 + 4 * cost) * 0.95 + dice.uniform(-0.03, 0.03)
    return {
        "schema": 2,
        "id": f"{dice.getrandbits(64):016x}",
        "setting": setting,
        "network": network,
        "drafter": drafter,
        "seed": seed,
        "budget": "tokens",
        "model": f"runs/ablation-small/{setting}/{network}-{seed}/network",
        "command": f"python ablate.py experiment=ablation/small 'only=[{network}/{drafter}]' seeds=[{seed}]",
        "config": {},
        "commit": "0f4225e0f4225e0f4225e0f4225e0f4225e0f422",
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.24.0"},
        "machine": "a processor",
        "threads": 2,
        "dtype": "float32",
        "form": "compiled",
        "warning": None,
        "settings": {"prompts": 40, "prompt_tokens": 64, "max_new_tokens": 128, "num_draft_tokens": 4},
        "chosen": {"num_draft_tokens": 4, "verifier": "block", "training": {"trainer.lr": 0.001}},
        "parameters": {"trunk": 8_300_000, "head": 2_400_000 if drafter in ("sequential", "parallel") else 0},
        "draft_flops": int(cost * 16_600_000),
        "cache_bytes": {"trunk": 24576, "head": 8192},
        "prefill_flops": {"trunk": 16_600_000, "head": 4_800_000},
        "training": {
            "tokens": 300_000, "flops": 15 * 10**12, "seconds": 190.0 + seed, "peak_memory": 900_000_000,
            "curve": [
                {"tokens": step * 30_000, "trunk": 2.4 + 4 / step + dice.random() / 20, "head": 3 + 4 / step}
                for step in range(1, 11)
            ],
        },
        "trunk": {
            "loss": alone + change, "loss_alone": None if harm is None else alone, "layers": 12,
            "entropy": 1.9, "distinct": [0.1, 0.3, 0.5, 0.6], "repeated_4grams": 0.4,
        },
        "expected": {**modes, "by_prompt": {mode: by_prompt(modes[mode], dice) for mode in modes}},
        "measured": {
            "greedy": {
                "tau": reached, "alpha": first, "conditional": modes["greedy"][3]["conditional"],
                "tokens_per_second": 400 * speed, "plain_tokens_per_second": 400.0, "speedup": speed,
                "draft_cost": cost + dice.uniform(-0.01, 0.01), "identical": True, "repeated_4grams": 0.4,
            },
            "sampled": {"tau": modes["token"][3]["tau"]},
            "speedup_interval": [speed - 0.05, speed + 0.06],
            "tau_interval": [reached - 0.1, reached + 0.1],
        },
        "predicted": {
            "speedup": reached / (1 + 4 * cost), "speedup_32_layers": reached / (1 + cost),
            "draft_cost": cost, "verify_cost": 1.1,
            "draft_cost_by_weights": cost / 2, "speedup_by_weights": reached / (1 + 2 * cost),
        },
    }  # fmt: skip


def by_prompt(entries: list[dict[str, Any]], dice: random.Random) -> list[dict[str, Any]]:
    """Tokens, steps by length, and tests and acceptances of four drafted tokens by depth, of six prompts."""
    found = []
    for _ in range(6):
        tokens, shares = 128, entries[3]["conditional"]
        tested = [tokens / entries[3]["tau"] * dice.uniform(0.9, 1.1)]
        for share in shares:
            tested.append(tested[-1] * share)
        steps = [tokens / entry["tau"] for entry in entries]
        found.append({"tokens": tokens, "steps": steps, "tested": tested[:-1], "accepted": tested[1:]})
    return found


MODES = {"greedy": 0.08, "token": 0.0, "block": 0.01}


def ledger(first: float, decay: float, drafter: str) -> list[dict[str, Any]]:
    """Entries for lengths 1 to 8, as independent draws would give them; parallel heads have four depths."""
    entries = []
    for length in range(1, 9):
        depth = min(length, 4) if drafter == "parallel" else length
        conditional = [min(first * decay**k, 0.99) for k in range(depth)]
        reached, tau = 1.0, 1.0
        for share in conditional:
            reached *= share
            tau += reached
        entries.append({"length": length, "tau": tau, "conditional": conditional})
    return entries


def synthetic_example() -> dict[str, Any]:
    """One text of twelve tokens, written with every drafter's help."""
    words = ["def", " main", "(", ")", ":", "\n", "    return", " 0", " # <b>", "\n", "\n", "class"]
    drafters = {}
    for name in FAMILIES:
        dice = random.Random(name)
        kinds = ["accepted" if dice.random() < FAMILIES[name][0] else "next" for _ in words]
        drafters[name] = [{"text": text, "kind": kind} for text, kind in zip(words, kinds, strict=True)]
    return {"prompt": "import os\n\n", "setting": "joint", "drafters": drafters}
