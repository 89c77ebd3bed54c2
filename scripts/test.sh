#!/usr/bin/env bash
# Everything that runs without a GPU: install if needed, lint, types, import contracts, tests.
#   bash scripts/test.sh                  all of it
#   bash scripts/test.sh tests/ops -k oracle   the checks, then pytest with these arguments
# A second run installs nothing and works offline. PYTHON=python3.12 chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh
export PATH="$PWD/.venv/bin:$PATH"

ruff check .
ruff format --check .
mypy
lint-imports
# one process a core; tests that take a fixture of a folder or a process group stay together
pytest -n 2 --dist loadscope "$@"
