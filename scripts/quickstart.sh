#!/usr/bin/env bash
# From a fresh clone to COCO AP: installs, trains on synthetic images, evaluates, draws predictions.
# Two CPU cores and 8 minutes are enough; nothing but Python packages is downloaded.
#   bash scripts/quickstart.sh               everything in outputs/quickstart; started again, it goes on or is done
#   bash scripts/quickstart.sh seed=1 name=quickstart_seed1     keys for the training
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/quoted.sh

bash scripts/install.sh
python=.venv/bin/python

run=outputs/quickstart
for override in "$@"; do
    [[ "$override" == name=* ]] && run="outputs/${override#name=}"
done

"$python" tools/train.py experiment=quickstart "$@"
"$python" tools/evaluate.py "checkpoint=$(quoted "$run/best.pt")" "output_dir=$(quoted "$run/evaluation")"
# pictures of the validation set for the last step, drawn anew
rm -rf "$run/images"
"$python" -c "
import sys
from detr.data import EvalTransform, SyntheticDataset
SyntheticDataset('val', EvalTransform(None, None), num_images=12).write_coco(sys.argv[1])
" "$run/images"
"$python" tools/predict.py "checkpoint=$(quoted "$run/best.pt")" "source=$(quoted "$run/images/val")" \
    "output_dir=$(quoted "$run/predictions")"
"$python" -c "
import json, sys
metrics = json.load(open(sys.argv[1] + '/evaluation/metrics.json'))
found = f\"AP {metrics['AP']:.3f}, AP50 {metrics['AP50']:.3f} on 200 unseen images\"
print(f'quickstart: {found}; pictures in {sys.argv[1]}/predictions')
" "$run"
