#!/usr/bin/env bash
# Qwen2.5-VL-7B on four GPUs, in both ways of placing encoders, beside fewer GPUs: one table.
#
#   bench/four_gpus.sh [--rehearse] [FOLDER]
#
# Results of every part are kept in FOLDER (bench/four_gpus.out), and the table at its end in
# FOLDER/table.md. A part that fails leaves its cells empty. --rehearse does the same with a small
# model at TP2 x PP2 on CPUs: it proves the script, its figures mean nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

rehearse=
[[ ${1:-} == --rehearse ]] && { rehearse=1; shift; }
out=${1:-bench/four_gpus.out}
mkdir -p "$out"
rm -f "$out"/*.json
failed=0

part() { # part NAME COMMAND...: shows what runs and for how long; goes on when it fails
    local name=$1 began=$SECONDS
    shift
    echo "== $name: $*"
    "$@" || { failed=1; echo "== $name failed"; }
    echo "== $name: $((SECONDS - began)) s"
}

model=$out/model
if [[ $rehearse ]]; then
    export OMP_NUM_THREADS=1
    layouts=("1 1" "2 2")
    decode=(--batches 1,2 --repeats 1 --busy-batch 2 --busy-tokens 120 --busy-after 0.3 --busy-s 0.3)
    vision=(--small --pictures 1,2 --repeats 1 --clip-tokens 1500 --memory 0.6)
    part checkpoint "$python" -m bench.served_shape "$model" --small --text
else
    layouts=("1 1" "2 1" "4 1" "2 2")
    decode=(--batches 1,32,128,256)
    vision=(--pictures 1,2,3,4 --repeats 8 --memory 0.7)
    part checkpoint "$python" -m bench.served_shape "$model" --text
fi

# Decode by batch size, how busy the GPUs are, and first choices against those of one GPU.
for layout in "${layouts[@]}"; do
    read -r tp pp <<< "$layout"
    reference=()
    [[ $layout == "1 1" ]] || reference=(--reference "$out/decode-1x1.json")
    part "decode-${tp}x$pp" "$python" -m bench.layouts --model "$model" --tp-size "$tp" --pp-size "$pp" \
        "${decode[@]}" "${reference[@]}" --json "$out/decode-${tp}x$pp.json"
done

# Pictures and the long clip: an encoder on each of the decoder's four GPUs, then two of their own.
part colocated "$python" -m bench.vision --model "$model" --load-format auto --tp-size 2 --pp-size 2 \
    --colocated --parts pictures,clip "${vision[@]}" --json "$out/colocated.json"
part apart "$python" -m bench.vision --model "$model" --load-format auto --tp-size 2 --encoders 2 \
    --parts pictures,clip "${vision[@]}" --json "$out/apart.json"

part table "$python" -m bench.four_gpus_table "$out"
exit $failed
