#!/usr/bin/env bash
# Train on all GPUs of this machine: one process a GPU, the batch size is per GPU.
#   bash scripts/train_multi_gpu.sh experiment=r50_50ep data.root=/data/coco
#   GPUS=2 bash scripts/train_multi_gpu.sh experiment=r50_50ep data.root=/data/coco
# The learning rate follows the total batch (optimizer.scale_lr), and the run says so in one line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/require_gpus.sh

gpus="${GPUS:-$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')}"
if [[ -z "${GPUS:-}" && "$gpus" == 0 ]]; then
    echo "no CUDA GPU is visible; train on the CPU with: .venv/bin/python tools/train.py $*" >&2
    exit 1
fi
require_gpus .venv/bin/python "$gpus"
exec .venv/bin/torchrun --standalone --nproc_per_node="$gpus" tools/train.py "$@"
