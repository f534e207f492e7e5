#!/usr/bin/env bash
# Sets up, lints and runs the tests.
#
#     scripts/test.sh [--fast] [pytest arguments]      --fast: without the tests marked slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=()
if [ "${1-}" = --fast ]; then
    selection=(-m "not slow")
    shift
fi

scripts/setup.sh --test
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet .
exec .venv/bin/python -m pytest "${selection[@]}" "$@"
