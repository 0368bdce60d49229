#!/usr/bin/env bash
# Decode engine on GPUs 4 to 7, the partner of deepseek_v4_flash_prefill.sh: the same
# model and DSPARK on both sides, so the draft's KV has somewhere to arrive. No HiCache.
set -euo pipefail

exec sglang serve \
  --model-path "${MODEL:-deepseek-ai/DeepSeek-V4-Flash-0731}" --trust-remote-code \
  --host "${HOST:-127.0.0.1}" --port "${PORT:-30001}" \
  --tp 4 --base-gpu-id 4 \
  --moe-runner-backend flashinfer_mxfp4 --disable-flashinfer-autotune \
  --swa-full-tokens-ratio 0.1 \
  --reasoning-parser deepseek-v4 --tool-call-parser deepseekv4 \
  --speculative-algorithm DSPARK \
  --chunked-prefill-size 4096 --mem-fraction-static 0.87 --cuda-graph-max-bs 64 \
  --disaggregation-mode decode --disaggregation-transfer-backend nixl \
  "$@"
