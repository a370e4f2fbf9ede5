"""The README's numbers are those of the results that are committed."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_readmes_table_is_that_of_the_results():
    lines = (ROOT / "docs/ablation/pystdlib/results.jsonl").read_text(encoding="utf-8").splitlines()
    results = {row["drafter"]: row["measured"] for row in map(json.loads, lines)}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^\| `(\w+)`[^|]*\| ([\d. ]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.M
    )
    assert {name for name, *_ in found} == set(results) - {"none"}
    for name, depths, greedy_tau, sampled_tau, cost, speedup in found:
        greedy, sampled = results[name]["greedy"], results[name]["sampled"]
        assert depths.split() == [f"{share:.2f}" for share in greedy["conditional"]]
        assert (greedy_tau, sampled_tau) == (f"{greedy['tau']:.2f}", f"{sampled['tau']:.2f}")
        assert (cost, speedup) == (f"{greedy['draft_cost']:.2f}", f"{greedy['speedup']:.2f}")
        assert greedy["identical"]


def test_what_is_said_of_the_grafted_head_was_measured():
    folder = ROOT / "networks/graft-smollm2"
    measured = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))
    found = measured["standings"]["overall"]["sequential 3"]
    assert found["identical"] == found["prompts"] == 16
    for page in (ROOT / "README.md", folder / "README.md"):
        assert f"τ {found['tau']:.2f}" in page.read_text(encoding="utf-8")
    depths = " ".join(f"{share:.2f}" for share in found["conditional"])
    assert f"accepted at depth 1, 2, 3: {depths}" in (folder / "README.md").read_text(encoding="utf-8")
