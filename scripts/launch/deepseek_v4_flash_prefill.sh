#!/usr/bin/env bash
# Prefill engine on GPUs 0 to 3: DeepSeek-V4-Flash with its bundled DSpark draft, NIXL
# or Mooncake, HiCache with file storage. Not run in this repository's tests, which have
# no GPU; they parse its flags. cpu_twin.sh runs the same topology with the flags that
# have a meaning on a CPU.
#
#   HICACHE_DIR=/fast/disk/hicache scripts/launch/deepseek_v4_flash_prefill.sh \
#     [flags of sglang serve]
#
# HICACHE_DIR      folder for KV files (no default)
# MODEL            checkpoint (default: deepseek-ai/DeepSeek-V4-Flash-0731)
# HOST             address to listen on, one that decode and router can reach (127.0.0.1)
# PORT             its HTTP port (30000)
# BOOTSTRAP_PORT   its bootstrap port (8998); router.sh needs the same value
# TRANSFER         transfer backend, the same on decode: nixl or mooncake (nixl)
set -euo pipefail

case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

export SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR="${HICACHE_DIR:?set HICACHE_DIR to a folder for KV files}"

# How long, in seconds, it holds a request for which decode has no place yet. Not more: it
# does not notice a decode that is gone. The default is 300.
export SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="${SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT:-30}"

# How long, in seconds, it keeps an idle connection: longer than the router, which does for
# 50. The default of 5 loses a request that the router sends at that moment.
export SGLANG_TIMEOUT_KEEP_ALIVE="${SGLANG_TIMEOUT_KEEP_ALIVE:-60}"

exec sglang serve \
  --model-path "${MODEL:-deepseek-ai/DeepSeek-V4-Flash-0731}" --trust-remote-code \
  --host "${HOST:-127.0.0.1}" --port "${PORT:-30000}" \
  --tp 4 --base-gpu-id 0 \
  --moe-runner-backend flashinfer_mxfp4 --disable-flashinfer-autotune \
  --swa-full-tokens-ratio 0.1 \
  --reasoning-parser deepseek-v4 --tool-call-parser deepseekv4 \
  --speculative-algorithm DSPARK \
  --chunked-prefill-size 16384 --mem-fraction-static 0.90 \
  --enable-hierarchical-cache --hicache-ratio 2 --hicache-size 0 \
  --hicache-mem-layout page_first_direct --hicache-io-backend direct \
  --hicache-write-policy write_through --hicache-storage-backend file \
  --hicache-storage-prefetch-policy wait_complete \
  --disaggregation-mode prefill --disaggregation-transfer-backend "${TRANSFER:-nixl}" \
  --disaggregation-bootstrap-port "${BOOTSTRAP_PORT:-8998}" \
  "$@"
