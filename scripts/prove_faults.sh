#!/usr/bin/env bash
# Injects faults into small training runs and prints what each of them cost, as the table of docs/reliability.md.
#
#   bash scripts/prove_faults.sh               all faults; some minutes on the CPU
#   bash scripts/prove_faults.sh "full disk"   some of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" tests/integration/fault_cases.py "$@"
