#!/usr/bin/env bash
# Take in a new SGLang release, one step per call of this script.
#
#   scripts/bump_release.sh 0.5.24 try       what fits the new release as it is, and which
#                                            upstream reviews to read
#   scripts/bump_release.sh 0.5.24 add       add it to the known releases, widen the ranges
#   scripts/bump_release.sh 0.5.24 goldens   write and show its golden files
#   scripts/bump_release.sh 0.5.24 drop      what no known release needs any more
#   scripts/bump_release.sh 0.5.24 verify    all releases: apply, compare, revert
#
# Nothing is committed. The page "Bumping a release" in docs_new says what to commit after
# each step. PYTHON names the interpreter; it needs the dev extra.
set -eu
case " $* " in
*" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
cd "$(dirname "$0")/.."
release=${1:?"usage: $0 X.Y.Z try|add|goldens|drop|verify"}
step=${2:?"usage: $0 X.Y.Z try|add|goldens|drop|verify"}
python=${PYTHON:-python3}
export PYTHONPATH=python:test/dspark_pd${PYTHONPATH:+:$PYTHONPATH}

unpack() {
    "$python" -c '
import sys, pathlib, release_wheels
release_wheels.unpack(sys.argv[1], pathlib.Path(sys.argv[2]))' "$release" "$1"
}

case $step in
try)
    target=$(mktemp -d)
    trap 'rm -rf "$target"' EXIT
    unpack "$target"
    # The exit code says whether all fit; the table and the errors say which do not.
    fits=0
    "$python" -m dspark_pd status --target "$target" --component all -v || fits=$?
    "$python" scripts/widen_releases.py --reviews
    exit "$fits"
    ;;
add)
    "$python" scripts/widen_releases.py "$release"
    git --no-pager diff --stat -- python/sglang
    ;;
goldens)
    "$python" -m pytest -q test/dspark_pd/test_releases.py -k goldens --update-goldens
    git --no-pager status --short -- test/dspark_pd/golden
    previous=$(ls test/dspark_pd/golden | sort -V | grep -B1 -x "$release" | head -1)
    git --no-pager diff --no-index --stat \
        "test/dspark_pd/golden/$previous" "test/dspark_pd/golden/$release" || true
    ;;
drop)
    "$python" scripts/widen_releases.py --droppable
    ;;
verify)
    "$python" -m pytest -q -m release test/dspark_pd
    PYTHON=$python scripts/check.sh
    ;;
*)
    echo "$0: unknown step $step" >&2
    exit 2
    ;;
esac
