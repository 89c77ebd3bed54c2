#!/usr/bin/env bash
# Makes .venv if there is none and installs this checkout with its development tools into it.
# Runs again only when pyproject.toml changed. PYTHON=python3.12 chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
stamp=.venv/.installed-from
wanted="$(cksum < pyproject.toml)"
if [[ -x .venv/bin/python && -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    exit 0
fi
if [[ ! -x .venv/bin/python ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed, but $python is $("$python" --version 2>&1)." \
            "Name another: PYTHON=python3.12 bash $0" >&2
        exit 1
    }
    "$python" -m venv .venv
fi
echo "installing into .venv (about two minutes the first time) ..."
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
echo "$wanted" > "$stamp"
