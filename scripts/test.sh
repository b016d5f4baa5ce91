#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [--all] [pytest arguments]
#   (nothing)   the quick suite: no slow tests, no compilation for other chips, and a third of the cases of each test
#   --all       formatting, lint, types, import contract, docs and the whole suite, as in CI
# Creates a virtual environment with pinned packages; requires only Python 3.11+ and pip. To use another Python in a separate
# environment: PYTHON=python3.12 scripts/test.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

all=false
if [[ "${1:-}" == --all ]]; then
  all=true
  shift
elif [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi

if $all; then setup_venv audit; else setup_venv; fi
cd "$root"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

failed=()
step() {
  local name="$1" began=$SECONDS
  shift
  echo "== $name"
  if "$@"; then
    echo "-- $name passed in $((SECONDS - began)) s"
  else
    echo "-- $name FAILED in $((SECONDS - began)) s"
    failed+=("$name")
  fi
}

# A worker runs whole files, so that the fixtures of a file are created once; the longest come first (tests/conftest.py).
tests=(python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 15)
if $all; then
  step "lint" ruff check .
  step "formatting" ruff format --check .
  step "types" pyright
  step "import contract" lint-imports --no-cache
  step "docs" env NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet
else
  tests+=(--quick)
fi
step "tests" "${tests[@]}" "$@"

if ((${#failed[@]})); then
  fail "failed: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
fi
echo "All passed in $SECONDS s."
