#!/usr/bin/env bash
# Sets up, lints and runs the tests. Fails when either does; pytest's closing line is the last.
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

lint_status=0
.venv/bin/ruff check --quiet . || lint_status=$?
.venv/bin/ruff format --check --quiet . || lint_status=$?

# One test process per core (four at most), each with one thread: OpenMP's threads spin while they wait for each other,
# which on busy cores made the suite several times slower. A module's tests stay together, for they share processes.
export OMP_NUM_THREADS=1
test_status=0
.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadscope "${selection[@]}" "$@" || test_status=$?

exit $((test_status ? test_status : lint_status))
