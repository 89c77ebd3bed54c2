#!/usr/bin/env bash
# What only GPUs can show, in about two minutes: NCCL, exact resume, flat memory, no host waits, saves beside the steps.
#
#   bash scripts/test_two_gpus.sh        first one GPU, then two
#   GPUS=8 bash scripts/test_two_gpus.sh
#
# Ends with a run of tools/train.py on all of them that is stopped by SIGTERM and goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/quoted.sh
source scripts/require_gpus.sh
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpus="${GPUS:-2}"
require_gpus "$python" "$gpus"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
torchrun=("$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus")

CUDA_VISIBLE_DEVICES=0 "$python" tests/integration/two_gpus.py "$folder" --steps 100
"${torchrun[@]}" tests/integration/two_gpus.py "$folder"

# 250 steps an epoch on any number of GPUs: the first checkpoint is that of the signal, not that of an epoch
train=(tools/train.py experiment=debug_cpu device=cuda "data.num_train_images=$((1000 * gpus))" schedule.epochs=2
    trainer.save_every_steps=null trainer.log_every=50 "output_dir=$(quoted "$folder/run")")
"${torchrun[@]}" "${train[@]}" &
launcher=$!
until grep -qs '"step": 200' "$folder/run/metrics.jsonl"; do
    kill -0 "$launcher" || { echo "BAD  the run ended by itself"; exit 1; }
    sleep 0.2
done
kill -TERM "$launcher"
wait "$launcher" || true
[[ -f "$folder/run/last.pt" ]] || { echo "BAD  no checkpoint after SIGTERM"; exit 1; }
# into a file: a reader that leaves early would break the pipe of a rank
"${torchrun[@]}" "${train[@]}" > "$folder/again.log"
step="$(sed -n 's/^resuming after step \([0-9]*\) .*/\1/p' "$folder/again.log")"
(( ${step:-0} >= 200 )) || { echo "BAD  it went on from step ${step:-0}"; exit 1; }
echo "ok   stopped by SIGTERM under NCCL after step $step and went on"
