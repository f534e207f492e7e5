#!/usr/bin/env bash
# Sets up, lints and runs the tests. Fails when one of them does; pytest's closing line is the last.
#
#     scripts/test.sh [--fast | --without-vllm] [pytest arguments]
#
# --fast: without the tests marked slow. --without-vllm: without the tests of the vLLM engines, which are run first, in
# an environment of their own (scripts/setup_vllm_cpu.sh: 2 to 3 GB). Those of them that are marked slow are left out: each
# starts vLLM anew, in several processes (.venv-vllm/bin/python -m pytest -m vllm tests).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection="not vllm" with_vllm=yes
case "${1-}" in
    --fast)
        selection="not slow" with_vllm=
        shift
        ;;
    --without-vllm)
        with_vllm=
        shift
        ;;
esac

scripts/setup.sh --test

status=0
.venv/bin/ruff check --quiet . || status=$?
.venv/bin/ruff format --check --quiet . || status=$?

# One test process per core (four at most), each with one thread: OpenMP's threads spin while they wait for each other,
# which on busy cores made the suite several times slower. A module's tests stay together, for they share processes.
export OMP_NUM_THREADS=1
nothing_selected=5 # pytest's status
found=$nothing_selected
run_tests() { # environment, marked, pytest arguments
    local environment=$1 marked=$2 pytest_status=0
    shift 2
    "$environment/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadscope -m "$marked" "$@" || pytest_status=$?
    [ $pytest_status -eq $nothing_selected ] || found=0
    [ $pytest_status -eq 0 ] || [ $pytest_status -eq $nothing_selected ] || status=$pytest_status
}

if [ -n "$with_vllm" ]; then
    scripts/setup_vllm_cpu.sh
    run_tests .venv-vllm "vllm and not slow" "$@"
fi
run_tests .venv "$selection" "$@"
exit $((status ? status : found)) # the arguments may select tests of one environment only, but not none
