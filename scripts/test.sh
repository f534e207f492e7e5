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

# One test process per core (four at most), each with one thread: OpenMP's threads spin while they wait for each other,
# which on busy cores made the suite ten times slower. A module's tests stay together, for they share started processes.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadscope "${selection[@]}" "$@"
