#!/usr/bin/env bash
# Runs the tests: unit tests in a minute, end-to-end tests with real engines.
#
#   scripts/test.sh                 everything
#   scripts/test.sh -m unit         no engine is started
#   scripts/test.sh -m e2e          prefill, decode and router on this CPU
#   scripts/test.sh [pytest options and paths]
#
# Makes the same environment as scripts/demo.sh, so it works from a fresh clone.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

prepare_environment
run_pip -r "$ROOT/requirements/check.txt"
cd "$ROOT"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# A whole run: two processes, because engines leave a core idle while they wait for time
# limits.
[ $# -gt 0 ] || set -- -n 2
exec "$VENV/bin/python" -m pytest --durations=15 "$@"
