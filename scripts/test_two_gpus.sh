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
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpus="${GPUS:-2}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
torchrun=("$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus")

CUDA_VISIBLE_DEVICES=0 "$python" tests/integration/two_gpus.py "$folder" --steps 100
"${torchrun[@]}" tests/integration/two_gpus.py "$folder"

train=(tools/train.py experiment=debug_cpu device=cuda data.num_train_images=2000 schedule.epochs=2
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
grep -m 1 "resuming after step" "$folder/again.log" && echo "ok   stopped by SIGTERM under NCCL and went on"
