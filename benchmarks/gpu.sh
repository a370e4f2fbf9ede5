#!/usr/bin/env bash
# On a machine with a CUDA device, from the root of a checkout: benchmarks/gpu.sh [OUT] [MODEL] [key=value …]
#
# Installs what is missing, runs the tests that need a GPU, then the benchmark in bfloat16 as it is and compiled, with
# the waits for the device counted by step. OUT (runs/gpu) gets a log, JSON and Markdown. Every part has a time limit,
# about eight minutes in all; one that fails or is too slow does not stop the others, and the exit status says how many
# did. What is said at the end as key=value goes to both benchmarks.
set -u -o pipefail
cd "$(dirname "$0")/.."

out=${1:-runs/gpu}
model=${2:-networks/pystdlib}
shift $(($# < 2 ? $# : 2))
extra=("$@")
dtype=${DTYPE:-bfloat16}
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=0

part() { # part NAME SECONDS COMMAND...: run with a limit, log it, count it if it fails
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    local status=${PIPESTATUS[0]}
    echo "== $name: status $status after $((SECONDS - began)) s"
    [ "$status" -eq 0 ] || failed=$((failed + 1))
}

installed() { # everything that pyproject.toml asks for, save what only `make check` needs
    "$python" - <<'PYTHON'
import importlib.util
import sys

names = ("torch", "transformers", "safetensors", "datasets", "lightning", "hydra", "rich", "jinja2", "pytest", "xdist", "hypothesis")
sys.exit(any(importlib.util.find_spec(name) is None for name in names))
PYTHON
}

# An image's own torch fits its driver, so it stays; everything else is what was tested.
install() {
    if "$python" -c "import torch" 2>/dev/null; then
        grep -v '^torch==' constraints.txt >"$out/constraints.txt"
    else
        cp constraints.txt "$out/constraints.txt"
    fi
    "$python" -m pip install -q -c "$out/constraints.txt" -e '.[dev]'
}
export -f install
export python out

installed || part install 150 bash -c install

bench() { # bench NAME KEY=VALUE...
    local name=$1
    shift
    part "$name" 110 "$python" benchmark.py "model=$model" "dtype=$dtype" threads=2 syncs=true per_category=2 \
        repeats=3 max_new_tokens=128 theory=1 "output=$out/$name.json" "table=$out/$name.md" "$@"
}

part tests 100 "$python" -m pytest -q -m gpu
bench plain "${extra[@]}"
bench compiled compile=true packed=false "${extra[@]}"

echo "$failed parts failed; results in $out"
exit "$failed"
