#!/usr/bin/env bash
# Trains a small decoder on the Python standard library's sources: unquantized, in int8, and in fp8 with delayed scaling.
# Prints a table of held-out loss, gap and step time, and writes runs/demo/report.html. Then it converts the int8 run to a
# quantized checkpoint, compares both, and completes a Python function with the checkpoint. Takes under 8 minutes on two
# cores. Creates a virtual environment with pinned packages; requires only Python 3.11+ and pip. If you run the script
# again, complete runs are not trained again, and interrupted runs resume.
# Start over: rm -r runs/demo
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"
  exit 0
elif (($#)); then
  fail "scripts/demo.sh takes no arguments, got: $*"
fi

setup_venv
cd "$root"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

train() {
  local name="$1"
  shift
  echo "== $name"
  python -m train configs/quickstart.yml "run_dir=runs/demo/$name" "$@" ||
    fail "training '$name' failed; if its folder has another configuration, rm -r runs/demo/$name and run again"
}

train unquantized
train int8 quantization=int8
train fp8 quantization=fp8
echo
python -m train compare runs/demo/unquantized runs/demo/int8 runs/demo/fp8 --out runs/demo/report.html
echo
echo "== serving int8"
if [[ ! -e runs/demo/int8-served ]]; then
  python -m train convert runs/demo/int8 --out runs/demo/int8-served ||
    fail "converting runs/demo/int8 failed"
fi
python -m train evaluate runs/demo/int8 runs/demo/int8-served
echo
echo "== completing a function, sampled from the most likely characters (--top-p 0.6); the first line is the prompt"
prompt=$'def __init__(self, name, value):\n        self.name = name\n        self.'
python -m train serve runs/demo/int8-served --max-new-tokens 120 --temperature 0.6 --top-p 0.6 --seed 1 --prompt "$prompt"
echo
echo "The report: $root/runs/demo/report.html"
echo "That took $((SECONDS / 60)) min $((SECONDS % 60)) s."
