#!/usr/bin/env bash
# Decode engine on GPUs 4 to 7, the partner of deepseek_v4_flash_prefill.sh: the same
# model and DSPARK on both sides, so the draft's KV has somewhere to arrive. No HiCache.
# Not run in this repository's tests, which have no GPU; they parse its flags.
#
#   scripts/launch/deepseek_v4_flash_decode.sh [flags of sglang serve]
#   ... --base-gpu-id 0      on a host where decode has GPUs 0 to 3
#
# MODEL     checkpoint (default: deepseek-ai/DeepSeek-V4-Flash-0731)
# HOST      address to listen on, one that prefill and router can reach (127.0.0.1)
# PORT      its HTTP port (30001)
# TRANSFER  transfer backend, the same on prefill: nixl or mooncake (nixl)
set -euo pipefail

case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

# How long, in seconds, it waits for the KV of a request, prefill's queue and computing
# included. The default is 300. It asks prefill every 2 s, in place of 5, whether it lives.
export SGLANG_DISAGGREGATION_WAITING_TIMEOUT="${SGLANG_DISAGGREGATION_WAITING_TIMEOUT:-120}"
export SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL="${SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL:-2}"

# How long, in seconds, it keeps an idle connection: longer than the router, which does for
# 50. The default of 5 loses a request that the router sends at that moment.
export SGLANG_TIMEOUT_KEEP_ALIVE="${SGLANG_TIMEOUT_KEEP_ALIVE:-60}"

exec sglang serve \
  --model-path "${MODEL:-deepseek-ai/DeepSeek-V4-Flash-0731}" --trust-remote-code \
  --host "${HOST:-127.0.0.1}" --port "${PORT:-30001}" \
  --tp 4 --base-gpu-id 4 \
  --moe-runner-backend flashinfer_mxfp4 --disable-flashinfer-autotune \
  --swa-full-tokens-ratio 0.1 \
  --reasoning-parser deepseek-v4 --tool-call-parser deepseekv4 \
  --speculative-algorithm DSPARK \
  --chunked-prefill-size 4096 --mem-fraction-static 0.87 \
  --cuda-graph-max-bs-decode 64 \
  --disaggregation-mode decode --disaggregation-transfer-backend "${TRANSFER:-nixl}" \
  "$@"
