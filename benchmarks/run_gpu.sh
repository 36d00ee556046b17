#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# flycomm on this machine's GPUs against every baseline found here, into benchmarks/results/NAME-WHAT.{jsonl,png}.
# Usage: benchmarks/run_gpu.sh NAME [GPUS] [option of `flycomm bench` …]     e.g. run_gpu.sh h200x2 2 --dtype f32
# WHAT chooses what is measured (default: all below; topk on one GPU). Each ends after LIMIT seconds (default 900)
# whatever happens; one that fails does not keep the others from running. FlashInfer's kernels, if it is installed,
# compile on first use. An exchange has MODE all (default), owner or shard.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
name=${1:?give a name for the results, for example h200x2}
gpus=${2:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
shift "$(($# < 2 ? $# : 2))"
code=0
all="all_reduce all_gather reduce_scatter all_reduce_norm moe_finalize_norm topk topk_exchange mono_ffn indexer"
for what in ${WHAT:-$all}; do
  ranks=$gpus
  case $what in
    all_reduce_norm) sizes=(--rows "1,4,16" --hidden "4096,6144,7168" --dtype bf16) ;;
    moe_finalize_norm) sizes=(--rows "1,4,16,48" --hidden "4096,7168" --k 8 --dtype bf16) ;;
    mono_ffn) sizes=(--rows "1,2,4,8,16,32,48" --hidden "6144" --intermediate "1024,2048" --dtype bf16) ;;
    indexer) # a case holds four caches of all its tokens: 2.2 GB of the largest
      sizes=(--kind "dsa,block_max" --context "32768,65536,262144,1048576" --requests "1,4" --query-rows "4") ;;
    topk) sizes=(--rows "1,16" --columns "65536,262144,1048576" --k "512,2048" --dtype f32) ranks=1 ;;
    topk_exchange) # columns are a rank's
      sizes=(--rows "1,16" --columns "32768,262144" --k "64,512,2048" --dtype f32 --exchange-mode "${MODE:-all}") ;;
    *) sizes=(--bytes "2KiB,4KiB,8KiB,16KiB,32KiB,64KiB,128KiB,256KiB,512KiB,1MiB" --dtype bf16) ;;
  esac
  results=benchmarks/results/$name-$what
  timeout --kill-after=30 "${LIMIT:-900}" \
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m flycomm bench "$what" \
    "${sizes[@]}" --mode graph --against all --fallback error --json "$results.jsonl" --plot "$results.png" "$@" ||
    code=$?
done
exit "$code"
