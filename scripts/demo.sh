#!/usr/bin/env bash
# Shows DSpark over prefill/decode disaggregation with real engines on this CPU.
#
#   scripts/demo.sh [--json FILE] [--modes A,B] [--requests N] [--keep-logs] ...
#
# From a fresh clone it makes .venv, installs pinned requirements, applies the patch
# set to the SGLang inside, starts engines and a router, sends prompts, prints a table
# and stops everything. Needs Linux, Python 3.11 to 3.13, 9 GiB of disk and 8 GiB of
# free memory. With --device cuda nothing is installed: it runs in the environment of
# PYTHON (default: python3), where you installed SGLang, its router, NIXL and this tool
# (pip install .), on one GPU. No GPU has run this yet. `scripts/demo.sh --help` lists all options once it is installed.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case " $* " in
  *" -h "* | *" --help "*)
    if [ ! -x "$VENV/bin/dspark-pd" ]; then
      sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
      exit 0
    fi
    ;;
  *" --device cuda "* | *" --device=cuda "*)
    exec "${PYTHON:-python3}" -m dspark_pd demo "$@"
    ;;
  *) prepare_environment ;;
esac

# exec: signals reach the program that owns the engines.
exec "$VENV/bin/dspark-pd" demo "$@"
