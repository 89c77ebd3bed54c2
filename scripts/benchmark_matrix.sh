#!/usr/bin/env bash
# The step benchmarks on the GPUs of this machine, one preset after the other; their reports end up in one folder.
#   bash scripts/benchmark_matrix.sh                                all presets but numerics
#   bash scripts/benchmark_matrix.sh batches variants               some, in this order
#   bash scripts/benchmark_matrix.sh batches time_limit_s=500 data.root=/data/coco     keys go to every preset
# OUT=FOLDER (default outputs/benchmarks) gets <preset>.md, .png, .csv, .jsonl and <preset>_kernels.md of each.
# Live anchor: where the transformers package is installed, its model is measured first and stands in `batches`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/quoted.sh
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
# a checkout that is not installed will do
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

out="${OUT:-outputs/benchmarks}"
presets=()
keys=()
for argument in "$@"; do
    if [[ "$argument" == *=* ]]; then keys+=("$argument"); else presets+=("$argument"); fi
done
[[ ${#presets[@]} -gt 0 ]] || presets=(batches variants accumulators precision kernels data recipe scaling)
mkdir -p "$out"

for preset in "${presets[@]}"; do
    run="$out/runs/$preset"
    extra=()
    if [[ "$preset" == batches ]] && "$python" -c 'import transformers' 2> /dev/null; then
        anchor="$out/runs/transformers.jsonl"
        if [[ ! -f "$anchor" ]]; then
            for batch in 16 4; do
                "$python" scripts/benchmark_transformers.py --batch-size "$batch" --output "$anchor" ||
                    echo "transformers, batch $batch: not measured" >&2
            done
        fi
        [[ -f "$anchor" ]] && extra=("extra_rows=[$(quoted "$anchor")]")
    fi
    "$python" tools/benchmark.py "benchmark=$preset" "output_dir=$(quoted "$run")" \
        ${extra[@]+"${extra[@]}"} ${keys[@]+"${keys[@]}"}
    sed "s|(report.png)|($preset.png)|" "$run/report.md" > "$out/$preset.md"
    cp "$run/report.png" "$out/$preset.png"
    cp "$run/rows.csv" "$out/$preset.csv"
    cp "$run/rows.jsonl" "$out/$preset.jsonl"
    [[ -f "$run/kernels.md" ]] && cp "$run/kernels.md" "$out/${preset}_kernels.md"
done
echo "reports are in $out"
