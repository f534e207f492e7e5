#!/usr/bin/env bash
# From a fresh clone to a distilled student: sets up .venv, then runs the demo. Arguments go to the demo (--seed 1, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python scripts/demo_arithmetic.py "$@"
