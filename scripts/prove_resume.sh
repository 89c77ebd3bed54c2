#!/usr/bin/env bash
# Kills training runs with SIGKILL at random moments and checks that nothing is lost but the last interval.
#
#   bash scripts/prove_resume.sh             20 kills on one and on two ranks, 100 kills while saving; minutes
#   bash scripts/prove_resume.sh --seed 7    other moments
#
# On the CPU; two ranks talk through gloo. What it showed is in docs/reliability.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" tests/integration/killed_runs.py resume --kills 20 --world-sizes 1 2 "$@"
"$python" tests/integration/killed_runs.py saving --kills 100 "$@"
