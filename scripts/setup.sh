#!/usr/bin/env bash
# Makes .venv in the repository's root and builds titan_opd into it. Quick when nothing has changed.
#
#     scripts/setup.sh [--test]      --test: also what scripts/test.sh needs
#
# An existing .venv is used as it is, with the torch that it holds. PYTHON names the interpreter of a new one
# (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_VERSION=2.13.0
OLDEST_PYTHON=3.10

fail() {
    echo "setup: $*" >&2
    exit 1
}

extras=""
case "${1-}" in
    "") ;;
    --test)
        extras="[test]"
        export TITAN_OPD_EMU=1 # the CUDA kernels in emulation (csrc/emu)
        ;;
    *) fail "unknown argument '$1'; usage: scripts/setup.sh [--test]" ;;
esac

make_venv() {
    local python=${PYTHON:-python3} version
    command -v "$python" >/dev/null || fail "no '$python' on PATH: install Python $OLDEST_PYTHON or newer, or name one with PYTHON="
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c "import sys; sys.exit(sys.version_info < (${OLDEST_PYTHON/./, }))" ||
        fail "$python is Python $version, $OLDEST_PYTHON or newer is needed: name another with PYTHON="
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments (Debian, Ubuntu: apt-get install python$version-venv)"
    echo "setup: virtual environment in .venv (Python $version)"
    "$python" -m venv .venv
}

pip_install() { # -qq: errors only
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$@"
}

torch_version() { # empty when torch is not installed; read from its metadata, for importing it takes seconds
    .venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true
}

fingerprint() { # of everything that the build depends on
    { torch_version; cat setup.py pyproject.toml; find csrc -type f -print0 | sort -z | xargs -0 cat; } | sha256sum | cut -d' ' -f1
}

[ -x .venv/bin/python ] || make_venv

if [ -z "$(torch_version)" ]; then
    echo "setup: torch $TORCH_VERSION"
    pip_install "torch==$TORCH_VERSION"
fi

stamp=.venv/titan_opd.stamp # "FINGERPRINT" or "FINGERPRINT [test]": with the tests' packages it serves both
if [[ "$(cat "$stamp" 2>/dev/null)" == "$(fingerprint)"*"$extras" ]] && compgen -G "titan_opd/_C.*so" >/dev/null; then
    exit
fi
pip_install "setuptools>=68,<82" wheel # torch 2.11 wants no newer one
.venv/bin/python setup.py --version >/dev/null # its checks first, so that their message stands alone
echo "setup: titan_opd$extras with torch $(torch_version): building csrc/, installing what is missing"
pip_install --no-build-isolation --use-pep517 -e ".$extras"
echo "$(fingerprint) $extras" >"$stamp"
