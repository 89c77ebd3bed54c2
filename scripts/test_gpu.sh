#!/usr/bin/env bash
# The tests that need a GPU: the kernels in every dtype and accumulator, and what only a device can show.
#
#   scripts/test_gpu.sh                     all of them
#   scripts/test_gpu.sh -k deterministic    some of them; arguments go to pytest
#
# Kernels are compiled on first use and kept in ~/.cache/deformable-detr, so the second run is faster.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
exec "$python" -m pytest -m gpu tests "$@"
