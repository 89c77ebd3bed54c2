#!/usr/bin/env bash
# The paper's COCO rows, one after the other, on all GPUs of this machine (total batch 32: 16 GPUs x 2, 8 x 4, 4 x 8).
#   DATA=/data/coco BATCH=4 bash scripts/reproduce_r50.sh                       all four
#   DATA=/data/coco BATCH=4 bash scripts/reproduce_r50.sh r50_refine_50ep       some
# Expected AP of each is in the header of configs/experiment/<name>.yaml. An interrupted run goes on where it stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/quoted.sh

: "${DATA:?set DATA to the COCO folder (annotations/, train2017/, val2017/); scripts/download_coco.sh fetches it}"
: "${BATCH:?set BATCH to the images a GPU; GPUs x BATCH should be 32}"
experiments=("$@")
[[ ${#experiments[@]} -gt 0 ]] || experiments=(r50_single_scale_50ep r50_50ep r50_refine_50ep r50_two_stage_50ep)

for experiment in "${experiments[@]}"; do
    bash scripts/train_multi_gpu.sh "experiment=$experiment" "data.root=$(quoted "$DATA")" "data.batch_size=$BATCH" \
        backbone.pretrained=true
done
