#!/usr/bin/env bash
# Router before one prefill and one decode engine, GPU or CPU.
#
#   PREFILL=http://host:30000 DECODE=http://host:30001 scripts/launch/router.sh \
#     [flags of sglang_router.launch_router]
#
# A dead engine is noticed after three health checks. They come every 60 s by default,
# which is minutes; here every 2 s. The circuit breaker is off: it counts a request that
# failed against both of its engines, so that a dead prefill also takes decodes out of
# service. A request that failed is sent again, four times, to the next engines in turn.
#
# PREFILL, DECODE   URLs of the engines (http://127.0.0.1:30000 and :30001)
# BOOTSTRAP_PORT    of the prefill engine (8998)
# HOST, PORT        where the router listens (127.0.0.1, 8000)
# PYTHON            interpreter that has sglang-router (python3)
set -euo pipefail

case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

exec "${PYTHON:-python3}" -m sglang_router.launch_router --pd-disaggregation \
  --prefill "${PREFILL:-http://127.0.0.1:30000}" "${BOOTSTRAP_PORT:-8998}" \
  --decode "${DECODE:-http://127.0.0.1:30001}" \
  --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" \
  --disable-circuit-breaker \
  --health-check-interval-secs 2 --health-success-threshold 1 \
  "$@"
