#!/usr/bin/env bash
# COCO 2017 (about 20 GB) in the layout that data.root expects.
#   bash scripts/download_coco.sh /data/coco
# Needs curl and unzip. Goes on where an interrupted download stopped; skips what is complete.
set -euo pipefail

root="${1:?usage: bash scripts/download_coco.sh FOLDER}"
mkdir -p "$root"
cd "$root"

fetch() { # URL, and a file that exists once it is unpacked
    local archive="${1##*/}"
    [[ -e "$2" ]] && return
    curl --fail --location --continue-at - --output "$archive" "$1"
    unzip -q -o "$archive"
    rm "$archive"
}

fetch http://images.cocodataset.org/annotations/annotations_trainval2017.zip annotations/instances_val2017.json
fetch http://images.cocodataset.org/zips/val2017.zip val2017/000000000139.jpg
fetch http://images.cocodataset.org/zips/train2017.zip train2017/000000000009.jpg
echo "COCO 2017 is in $root: use data.root=$root"
