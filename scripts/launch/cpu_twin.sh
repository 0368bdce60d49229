#!/usr/bin/env bash
# The same topology on one CPU with the tiny models: prefill with HiCache and file
# storage, decode, router, DSPARK on both, NIXL or Mooncake between them. All on
# 127.0.0.1 (Mooncake's own ports: on every address); runs until Ctrl-C, which stops
# everything.
#
#   scripts/launch/cpu_twin.sh          then: curl 127.0.0.1:8000/v1/chat/completions ...
#   TP=2 scripts/launch/cpu_twin.sh     two ranks per engine
#   TRANSFER=mooncake scripts/launch/cpu_twin.sh
#
# Kept from the GPU scripts, values scaled down: speculative algorithm, chunked prefill
# size, every HiCache flag, transfer backend, modes, ports.
# Left out, because they have no meaning here: --base-gpu-id (no GPU),
# --moe-runner-backend and --disable-flashinfer-autotune (no MoE layer, no FlashInfer),
# --swa-full-tokens-ratio (the tiny target has no sliding window),
# --mem-fraction-static (the pool is sized in tokens),
# --cuda-graph-max-bs-decode (no graphs), --reasoning-parser and --tool-call-parser (the
# tiny model does neither).
#
# TP                         ranks per engine (1)
# TRANSFER                   transfer backend: nixl or mooncake (nixl)
# PREFILL_PORT, DECODE_PORT  HTTP ports of the engines (30000, 30001)
# BOOTSTRAP_PORT, PORT       of prefill and of the router (8998, 8000)
# HICACHE_DIR                folder for KV files (in the log folder)
# PYTHON, DSPARK_PD_VENV     interpreter and place of the environment it makes
set -euo pipefail

case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

. "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
prepare_environment

exec "$VENV/bin/python" -m dspark_pd.bed.serve --tp "${TP:-1}" \
  --transfer-backend "${TRANSFER:-nixl}" \
  --prefill-port "${PREFILL_PORT:-30000}" --decode-port "${DECODE_PORT:-30001}" \
  --bootstrap-port "${BOOTSTRAP_PORT:-8998}" --port "${PORT:-8000}" \
  ${HICACHE_DIR:+--hicache-dir "$HICACHE_DIR"} "$@"
