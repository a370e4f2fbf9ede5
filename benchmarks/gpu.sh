#!/usr/bin/env bash
# On a machine with a CUDA device, from the root of a checkout: benchmarks/gpu.sh [OUT] [MODEL] [key=value …]
#
# Installs what is missing, runs the tests that need a GPU, then the benchmark in bfloat16 as it is and compiled, with
# the waits for the device counted by step. OUT (runs/gpu) gets logs and JSON, PAGE (docs/benchmarks.md) a chapter for
# each. Every part has a time limit, eight minutes in all; one that fails or is too slow does not stop the others, and
# the exit status says how many did. What is said at the end as key=value goes to both benchmarks. Started again, it
# goes on: prompts that are done are not measured again. Where there is no GPU, DTYPE=float32 runs all of it on the CPU,
# and PATIENCE=3 gives every part three times as long.
set -u -o pipefail
cd "$(dirname "$0")/.."

out=${1:-runs/gpu}
model=${2:-networks/pystdlib}
shift $(($# < 2 ? $# : 2))
extra=("$@")
dtype=${DTYPE:-bfloat16}
page=${PAGE:-docs/benchmarks.md}
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=0

part() { # part NAME SECONDS COMMAND...: run with a limit, log it, count it if it fails
    local name=$1 limit=$(($2 * ${PATIENCE:-1})) began=$SECONDS
    shift 2
    echo "== $name"
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
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

# An image's own torch fits its driver, so it stays; everything else is what was tested. A bare image lacks Python, and
# what torch.compile needs: a C compiler and Python's headers.
install() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get && ! { command -v "$python" && command -v gcc; }; then
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y python3-venv python3-dev g++
    fi
    if "$python" -c "import torch" 2>/dev/null; then
        grep -v '^torch==' constraints.txt >"$out/constraints.txt"
    else
        cp constraints.txt "$out/constraints.txt"
    fi
    "$python" -m venv --system-site-packages "$out/venv"
    "$out/venv/bin/python" -m pip install -q -c "$out/constraints.txt" -e '.[dev]'
}
export -f install
export python out

[ -x "$out/venv/bin/python" ] && python=$out/venv/bin/python
if ! installed; then
    part install 200 bash -c install
    python=$out/venv/bin/python
fi

bench() { # bench NAME SECONDS KEY=VALUE...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" benchmark.py "model=$model" "dtype=$dtype" threads=2 syncs=true per_category=1 \
        repeats=3 max_new_tokens=64 theory=1 "output=$out/$name.json" "table=$page" "$@"
}

mapfile -t marked < <(grep -rl --include='test_*.py' 'mark\.gpu' tests) # collecting all others takes as long
part tests 100 "$python" -m pytest -q -m gpu "${marked[@]}"
bench plain 80 compile=false "${extra[@]}"
bench compiled 100 compile=true packed=false "${extra[@]}"

echo "$failed parts failed; results in $out and $page"
exit "$failed"
