#!/usr/bin/env bash
# Checks and times everything on the NVIDIA GPU of this machine, meant for under 8 minutes: every kernel of ours against its
# reference, not interpreted; the GEMM set of a layer and a whole Llama layer in bf16, in our recipes, in flax's fp8,
# Qwix, AQT and torch's _scaled_mm where installed, in one run each; training steps of the quickstart.
# Writes JSON, tables and plots to benchmarks/. Takes the Python that is there if it has a jax that sees the GPU and what
# the benchmarks import; otherwise makes .venv with the pinned packages and jax for CUDA.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"
  exit 0
elif (($#)); then
  fail "scripts/gpu.sh takes no arguments, got: $*"
fi

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  fail "scripts/gpu.sh needs an NVIDIA GPU, and nvidia-smi finds none on this machine; nothing was installed"
fi

cd "$root"
export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false  # torch has a part of the memory
python="$(find_python)"
sees_gpu() {
  PYTHONPATH="$root" "$1" -c 'import jax, scripts.bench; assert jax.devices()[0].platform == "gpu"' 2>/dev/null
}
if sees_gpu "$python"; then
  export PYTHONPATH="$root"
else
  JAX_PLATFORMS=cpu setup_venv
  python="$(command -v python)"
  if ! sees_gpu "$python"; then
    echo "Installing jax for CUDA in ${VIRTUAL_ENV#"$root"/} ..."
    "$python" -m pip install --quiet "jax[cuda12]==$("$python" -c 'import jax; print(jax.__version__)')" ||
      fail "installing jax[cuda12] failed; the lines above say why"
    sees_gpu "$python" || fail "jax does not see the GPU that nvidia-smi lists; the driver may be too old for CUDA 12"
  fi
fi

failed=()
step() {
  local name="$1" began=$SECONDS
  shift
  echo "== $name"
  if "$@"; then echo "-- $name: $((SECONDS - began)) s"; else failed+=("$name"); fi
}
step "kernels" "$python" scripts/bench.py kernels --rounds 10
step "GEMM set" "$python" scripts/bench.py gemm-set --rounds 10
step "layer step" "$python" scripts/bench.py layer-step --rounds 10
step "quickstart" "$python" scripts/bench.py steps --quick

if ((${#failed[@]})); then
  fail "failed: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
fi
echo "That took $((SECONDS / 60)) min $((SECONDS % 60)) s. The figures: $root/benchmarks"
