# Functions for the scripts in this folder: find a Python, create a virtual environment, install the pinned packages.
# Source this file from a script with set -euo pipefail.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
  echo "error: $*" >&2
  exit 1
}

# Prints the interpreter to use: $PYTHON if it is set, otherwise the first of the usual names that is 3.11 or newer.
find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not an executable; set it to a name or path of Python 3.11+"
    is_new_enough "$PYTHON" ||
      fail "PYTHON=$PYTHON does not run as Python 3.11 or newer, got: $("$PYTHON" --version 2>&1 | head -n 1)"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found; install one, or set PYTHON: PYTHON=/path/to/python3.12 $0"
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Creates .venv (or .venv-MAJOR.MINOR if PYTHON is set) with the pinned packages and puts it first on PATH. Installs
# nothing if a stamp file matches the pins, package metadata and interpreter. The argument "audit" also installs the
# compilers for chips that this machine does not have (1 GB). The compilers have a separate stamp file, so a call without
# "audit" does not remove them.
setup_venv() {
  local with="${1:-}" base version pins venv stamp wanted
  base="$(find_python)"
  version="$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  if [[ "$version" == 3.11 ]]; then pins="$root/constraints/py311.txt"; else pins="$root/constraints/py312.txt"; fi
  venv="$root/.venv${PYTHON:+-$version}"
  stamp="$venv/.installed"
  wanted="$(cd "$root" && "$base" -c '
import hashlib, json, pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())
parts = [sys.version, pathlib.Path(sys.argv[1]).read_text(), project["project"], project["build-system"]]
print(hashlib.sha256(json.dumps(parts).encode()).hexdigest())' "$pins")"

  if [[ ! -x "$venv/bin/python" || "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "Installing pinned packages for Python $version in ${venv#"$root"/} (a few minutes the first time) ..."
    "$base" -m pip --version >/dev/null 2>&1 || fail "$base has no pip; install it, then run again"
    # The pip of the base interpreter installs a pinned pip, because some systems have no ensurepip.
    "$base" -m venv --clear --without-pip "$venv" || fail "$base cannot create a virtual environment in $venv; check that the folder is writable"
    "$base" -m pip --python "$venv/bin/python" install --quiet --constraint "$pins" pip setuptools ||
      fail "installing pip and setuptools in $venv failed; the lines above say why"
    # PYTHONWARNINGS: setuptools warns that an editable install uses this folder, which is intended.
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --constraint "$pins" --no-build-isolation \
      --editable "$root[train,parquet,docs,dev]" ||
      fail "the pinned install failed; the lines above say why"
    echo "$wanted" >"$stamp"
  fi
  if [[ "$with" == audit && "$(cat "$stamp-audit" 2>/dev/null)" != "$wanted" ]]; then
    echo "Installing the compilers for other chips in ${venv#"$root"/} ..."
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --constraint "$pins" --no-build-isolation \
      --editable "$root[audit-gpu,audit-tpu]" ||
      fail "installing the extras audit-gpu and audit-tpu failed; the lines above say why"
    echo "$wanted" >"$stamp-audit"
  fi
  export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" PYTHONNOUSERSITE=1
  unset PYTHONPATH PYTHONHOME
}
