#!/usr/bin/env bash
# What only a GPU can decide: seven checks on one GPU with the tiny models, a pass line
# for each, and one JSON file to paste into a report. No GPU has run it yet.
#
#   scripts/gpu_check.sh [--json FILE] [--device cpu]
#
# 1 start  2 native with decode graphs and overlap  3 200 requests at concurrency 16
# 4 tail, prefill without graphs  5 with graphs  6 pinned memory  7 retraction with the
# default backup. Meant to take under 15 minutes.
#
# Nothing is installed: it runs in the environment of PYTHON (default: python3), where you
# installed SGLang, its router, NIXL and this tool (pip install .) and ran dspark-pd apply.
# --device cpu rehearses the list on the CPU reference platform, in the environment that
# scripts/demo.sh makes (PYTHON=.venv/bin/python).
set -euo pipefail

case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
case " $* " in
  *" --device cpu "* | *" --device=cpu "*) ;;
  *) export DSPARK_PD_ZYGOTE=0 ;;
esac

exec "${PYTHON:-python3}" -m dspark_pd.bed.gpu_check "$@"
