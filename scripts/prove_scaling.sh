#!/usr/bin/env bash
# A run on several ranks is the run on one, and survives the death of a rank.
#
#   bash scripts/prove_scaling.sh            4 gloo ranks on the CPU, the tiny model, 60 steps; minutes
#   GPUS=8 bash scripts/prove_scaling.sh     8 GPUs, experiment=r50_refine_50ep on synthetic images, 300 steps
#
# OUT=DIR keeps the runs: given again, it goes on where it was cut short, and says which runs it takes as they are.
# What it showed is in docs/benchmarks/scaling.md.
set -euo pipefail
# relative to where the command is typed
[[ -z "${OUT:-}" ]] || OUT="$(realpath -m "$OUT")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/require_gpus.sh
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
folder="${OUT:-}"
if [[ -z "$folder" ]]; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
fi

if [[ -z "${GPUS:-}" ]]; then
    "$python" tests/integration/scaling_runs.py "$folder" --ranks 4 --overrides experiment=debug_cpu data.pad_to=96 \
        backbone.freeze_norm=true "$@"
else
    require_gpus "$python" "$GPUS" 2
    "$python" tests/integration/scaling_runs.py "$folder" --ranks "$GPUS" --batch-size 4 --steps 300 --overrides \
        experiment=r50_refine_50ep data=synthetic '~data.label_map' backbone.pretrained=false data.size=512 data.pad_to=512 \
        data.num_val_images=40 data.num_workers=8 precision=bf16 "$@"
fi
