#!/usr/bin/env bash
# Checks and times everything on the NVIDIA GPU of this machine, or the steps that are named:
#   kernels      every kernel of ours against its reference, not interpreted
#   strings      a layer and its gradients under every config string against the same on the CPU
#   gemm-set     the GEMMs of a layer in bf16, our recipes, flax's fp8, Qwix, AQT and torch's _scaled_mm where installed
#   layer-step   a Llama layer, likewise
#   yardstick    an MLP step of ours and theirs, its time beside the one predicted without the chip
#   optimizer    updates with 8-bit state
#   steps        training steps of the quickstart
# A step that is not ready to time after $JAXQUANT_GPU_PATIENCE seconds (default: 900) is stopped. XLA times algorithms as it
# does for users, unless XLA_FLAGS say otherwise (benchmarks/on-chip.md), which can take minutes.
# Writes JSON, tables and plots to benchmarks/. Takes the Python that is there if it has a jax that sees the GPU and what
# the benchmarks import; otherwise makes .venv with the pinned packages and jax for CUDA.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,13s/^# //p' "${BASH_SOURCE[0]}"
  exit 0
fi
known=(kernels strings gemm-set layer-step yardstick optimizer steps)
patience="${JAXQUANT_GPU_PATIENCE:-900}"
for word in "$@"; do
  [[ "$word" != *" "* && " ${known[*]} " == *" $word "* ]] || fail "scripts/gpu.sh has no step '$word'; its steps are: ${known[*]}"
done
(($#)) || set -- "${known[@]}"

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  fail "scripts/gpu.sh needs an NVIDIA GPU, and nvidia-smi finds none on this machine; nothing was installed"
fi

cd "$root"
export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false  # torch has a part of the memory
python="$(find_python)"
sees_gpu() {
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$1" -c 'import jax, scripts.bench; assert jax.devices()[0].platform == "gpu"' 2>/dev/null
}
if sees_gpu "$python"; then
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
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

# All steps compile side by side, which takes most of the time; then one after the other is told to time.
declare -A options=([kernels]="--rounds 10" [strings]="" [gemm-set]="--rounds 10 --whole" [layer-step]="--rounds 10"
  [yardstick]="--rounds 10" [optimizer]="--rounds 10" [steps]="--quick")
turns="$(mktemp -d)"
failed=()
declare -A pids=()
stop() {  # each process and its children
  for pid in "$@"; do
    pkill -P "$pid" || true
    kill "$pid" 2>/dev/null || true
  done
}
trap 'stop "${pids[@]}"; rm -rf "$turns"' EXIT
trap 'exit 130' INT TERM
for step in "$@"; do
  # shellcheck disable=SC2086  # options are words
  JAXQUANT_BENCH_TURN="$turns/$step" "$python" scripts/bench.py "$step" ${options[$step]} \
    >"$turns/$step.out" 2> >(sed "s/^/$step: /" >&2) &
  pids[$step]=$!
done
for step in "$@"; do
  while kill -0 "${pids[$step]}" 2>/dev/null && [[ ! -e "$turns/$step.ready" ]]; do
    if ((SECONDS > patience)); then
      echo "$step did not compile and compare within $patience s, and is stopped; does a kernel hang?" >&2
      stop "${pids[$step]}"
      break
    fi
    sleep 0.2
  done
done
for step in "$@"; do
  touch "$turns/$step.go"
  wait "${pids[$step]}" || failed+=("$step")
  echo "== $step, after $SECONDS s"
  cat "$turns/$step.out"
done

if ((${#failed[@]})); then
  fail "failed: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
fi
echo "That took $((SECONDS / 60)) min $((SECONDS % 60)) s. The figures: $root/benchmarks"
