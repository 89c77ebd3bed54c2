#!/usr/bin/env bash
# COCO 2017 (20 GB; 40 GB while unpacking) in the layout that data.root expects.
#   bash scripts/download_coco.sh /data/coco [MIRROR]
# Needs curl, unzip and md5sum. Started again it goes on where it stopped and skips what is complete. Checksums are
# those of coco2017.md5 beside this script.
set -euo pipefail

root="${1:?usage: bash scripts/download_coco.sh FOLDER [MIRROR]}"
mirror="${2:-http://images.cocodataset.org}"
checksums="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/coco2017.md5"
mkdir -p "$root"
cd "$root"

is_whole() { # ARCHIVE, CHECKSUM
    [[ -f "$1" ]] && echo "$2  $1" | md5sum --check --status
}

while read -r checksum path; do
    archive="${path##*/}"
    folder="${archive%.zip}"                # train2017.zip holds train2017/
    folder="${folder/annotations_*/annotations}"
    if [[ -d "$folder" ]]; then
        echo "$folder: complete"
        continue
    fi
    if ! is_whole "$archive" "$checksum"; then
        status=0
        answer="$(curl --fail --location --continue-at - --write-out '%{http_code}' --output "$archive" \
            "$mirror/$path")" || status=$?
        if ! is_whole "$archive" "$checksum"; then
            # 416: there is nothing beyond what is here, which is wrong
            if [[ $status == 0 || "$answer" == 416 ]]; then
                rm -f "$archive"
                echo "error: $mirror/$path does not have the MD5 $checksum, so it was deleted. Run this again," \
                    "or try another MIRROR" >&2
            else
                echo "error: the download of $mirror/$path was interrupted (curl: $status, HTTP $answer)." \
                    "Run this again to go on" >&2
            fi
            exit 1
        fi
    fi
    # a folder of the final name is a complete one
    rm -rf .unpacking
    unzip -q "$archive" -d .unpacking
    mv ".unpacking/$folder" "$folder"
    rm -rf .unpacking "$archive"
    echo "$folder: downloaded"
done < "$checksums"
echo "COCO 2017 is in $root: use data.root=$root"
