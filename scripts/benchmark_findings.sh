#!/usr/bin/env bash
# Every finding of docs/findings.md on the GPU of this machine, one preset after the other.
#   bash scripts/benchmark_findings.sh                        all, some minutes on a large GPU
#   bash scripts/benchmark_findings.sh accumulators tiling    some, in this order
#   bash scripts/benchmark_findings.sh npu_claims benchmark.rounds=1     keys go to every preset
# OUT=FOLDER (default outputs/findings) gets ops_<name>.md, .png, .csv and .jsonl of each. A preset that fails is said at
# the end, and the others run all the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/quoted.sh
python=python
[[ -x .venv/bin/python ]] && python=.venv/bin/python
# a checkout that is not installed will do
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

out="${OUT:-outputs/findings}"
names=()
keys=()
for argument in "$@"; do
    if [[ "$argument" == *=* ]]; then keys+=("$argument"); else names+=("$argument"); fi
done
[[ ${#names[@]} -gt 0 ]] || names=(flops memory npu_claims accumulators dispatch_order tiling)

mkdir -p "$out"
failed=()
for name in "${names[@]}"; do
    start=$SECONDS
    "$python" tools/benchmark_ops.py "benchmark=ops_$name" "output_dir=$(quoted "$out")" \
        ${keys[@]+"${keys[@]}"} > "$out/$name.log" ||
        failed+=("$name")
    grep -h '^Verdict' "$out/$name.log" || true
    echo "$name: $((SECONDS - start)) s"
done
echo "reports are in $out"
[[ ${#failed[@]} -eq 0 ]] || { echo "failed: ${failed[*]}" >&2; exit 1; }
