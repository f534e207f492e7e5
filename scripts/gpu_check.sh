#!/usr/bin/env bash
# Builds the CUDA kernels in place, checks and measures them on this machine's GPU, and writes a report. No internet.
#
#     scripts/gpu_check.sh          report.md and report.json in $OUT, or in build/gpu_report where OUT is not set
#
# Needs a Python with torch for CUDA and setuptools (PYTHON=..., default python3), g++ and nvcc; no other package. With
# pytest, hypothesis and numpy installed, tests/kernels runs too. Exit code 0: everything passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-build/gpu_report}

fail() { echo "gpu_check: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no '$python' on PATH: name a Python with torch by PYTHON=..."
missing=$("$python" - <<'PYTHON'
from importlib.util import find_spec
print(" ".join(name for name in ("torch", "setuptools") if find_spec(name) is None))
PYTHON
)
[ -z "$missing" ] || fail "$python lacks: $missing"
capability=$("$python" -c 'import torch
if torch.cuda.is_available(): print("%d%d" % torch.cuda.get_device_capability())')
[ -n "$capability" ] || fail "torch finds no CUDA device here; '$python scripts/gpu_check.py --device cpu' checks the CPU's kernels"
command -v nvcc >/dev/null || [ -n "${CUDA_HOME-}" ] || fail "no nvcc: put the CUDA toolkit's on PATH, or name its folder with CUDA_HOME"
[ "$capability" = 90 ] && capability=90a # Hopper's own instructions need the a

mkdir -p "$out"
echo "building for sm_$capability; the compiler's output goes to $out/build.log"
# The emulation is for pytest: tests/kernels imports it.
TITAN_OPD_CUDA=1 TITAN_OPD_EMU=1 TITAN_OPD_CUDA_ARCHS=$capability \
    "$python" setup.py build_ext --inplace >"$out/build.log" 2>&1 || {
    tail -n 40 "$out/build.log" >&2
    fail "the build failed, see $out/build.log"
}
exec "$python" scripts/gpu_check.py --device cuda --tests --benchmarks --out "$out"
