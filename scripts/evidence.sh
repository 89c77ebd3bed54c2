#!/usr/bin/env bash
# What docs/results.md shows, on one GPU with 16 cores. Each part takes about ten minutes; one that was cut short goes on
# when it is given again.
#   DATA=DIR WEIGHTS=FILE bash scripts/evidence.sh kernels        30 short runs, five at once (again for what is left)
#   GPUS=2 DATA=DIR WEIGHTS=FILE bash scripts/evidence.sh kernels likewise with two GPUs and 32 cores, ten at once
#   DATA=DIR WEIGHTS=FILE bash scripts/evidence.sh bccd           the full recipe, three seeds at once
#   DATA=DIR WEIGHTS=FILE bash scripts/evidence.sh two_stage      likewise with two stages
#   bash scripts/evidence.sh gradients                            after kernels: distances from float64 along its first run
#   bash scripts/evidence.sh synthetic                            R50 from scratch, 10 minutes, the fast step
#   bash scripts/evidence.sh synthetic_parity                     the same time, the plain step
#   IMAGES=DIR bash scripts/evidence.sh offsets                   after bccd: where its attention samples on other images
# DATA: blood cells, annotations/instances_{train,val}.json, train/, val/. WEIGHTS: of timm's tf_efficientnet_lite0.
# MINUTES (default 9) ends a comparison's sitting, TRAIN_MINUTES (default 10) a synthetic run. OUT (default
# outputs/evidence) keeps the runs, REPORTS (default OUT/reports) gets tables and plots.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/quoted.sh"
python=python
[[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
# a checkout that is not installed will do
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

out="${OUT:-outputs/evidence}"
reports="${REPORTS:-$out/reports}"
mkdir -p "$out" "$reports"
[[ $# -gt 0 ]] || set -- kernels bccd two_stage gradients synthetic synthetic_parity

listed() { # paths, one a line, as a list of Hydra
    local path items=()
    while IFS= read -r path; do items+=("$(quoted "$path")"); done
    local IFS=,
    echo "[${items[*]}]"
}

compare() { # name of the report, preset, runs at once, further keys
    local name="$1" preset="$2" parallel="$3" folder="$out/$2"
    : "${DATA:?set DATA to the folder of the blood cells}" "${WEIGHTS:?set WEIGHTS to weights of tf_efficientnet_lite0}"
    local keys="\"data.root=$(quoted "$DATA")\",\"backbone.pretrained=$(quoted "$WEIGHTS")\""
    # compilers of all runs share the cores
    TORCHINDUCTOR_COMPILE_THREADS=3 "$python" "$root/tools/compare_accuracy.py" "accuracy=$preset" \
        "output_dir=$(quoted "$folder")" "num_parallel=$parallel" "gpus=${GPUS:-1}" "minutes=${MINUTES:-9}" \
        "train=[$keys,\"data.cache_dir=/dev/shm/evidence\"]" "${@:4}"
    sed "s|(curves.png)|(accuracy_$name.png)|" "$folder/report.md" > "$reports/accuracy_$name.md"
    cp "$folder/curves.png" "$reports/accuracy_$name.png"
    cp "$folder/rows.csv" "$reports/accuracy_$name.csv"
    cp "$folder/rows.jsonl" "$reports/accuracy_$name.jsonl"
}

synthetic() { # name of the run, keys
    "$python" "$root/tools/train.py" experiment=synthetic_r50 "output_dir=$(quoted "$out/$1")" \
        "trainer.max_minutes=${TRAIN_MINUTES:-10}" "${@:2}"
    local runs
    runs="$(find "$out" -maxdepth 2 -path "$out/synthetic_r50*/metrics.jsonl" -printf '%h\n' | sort | listed)"
    "$python" "$root/tools/compare_runs.py" "runs=$runs" 'at=[2.5,5,7.5,10]' \
        "output_dir=$(quoted "$out/synthetic")" 'title=R50 from scratch on synthetic images'
    sed 's|(runs.png)|(synthetic_r50.png)|' "$out/synthetic/runs.md" > "$reports/synthetic_r50.md"
    cp "$out/synthetic/runs.png" "$reports/synthetic_r50.png"
}

for part in "$@"; do
    echo "== $part" >&2
    case "$part" in
        kernels) compare kernels kernels 5 ;;
        bccd) compare bccd bccd 3 'only=[refine]' ;;
        two_stage) compare bccd bccd 3 'only=[two_stage]' ;;
        gradients)
            run="$out/kernels/runs/triton_bf16_seed0"
            [[ -d "$run" ]] || { echo "there is no $run; run the part kernels first" >&2; exit 1; }
            checkpoints="$(find "$run" -name 'step_*.pt' | sort | listed)"
            "$python" "$root/tools/compare_gradients.py" "checkpoints=$checkpoints" \
                "output_dir=$(quoted "$out/gradients")"
            cp "$out/gradients/gradients.png" "$out/gradients/gradients.json" "$reports/"
            cp "$out/gradients/gradients.md" "$reports/"
            ;;
        synthetic) synthetic synthetic_r50 ;;
        synthetic_parity)
            synthetic synthetic_r50_parity kernel=reference precision=fp32 trainer.compile=false \
                trainer.cuda_graphs=false
            ;;
        offsets)
            : "${IMAGES:?set IMAGES to a folder of images}"
            "$python" "$root/tools/inspect_attention.py" \
                "checkpoint=$(quoted "$out/bccd/runs/refine_seed0/best.pt")" "source=$(quoted "$IMAGES")" \
                "output_dir=$(quoted "$out/offsets")"
            cp "$out/offsets/sampling.md" "$reports/offsets.md"
            ;;
        *)
            echo "unknown part $part; see the top of this file" >&2
            exit 2
            ;;
    esac
done
echo "reports are in $reports" >&2
