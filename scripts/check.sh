#!/usr/bin/env bash
# Everything that is checked without running the product: format, lint, types, the patch
# set against its repository, generated docs, sizes. Runs all checks, then fails if one
# did.
#
#   scripts/check.sh
#
# PYTHON names the interpreter; it needs the dev extra (pip install -e '.[dev]').
set -u
case " $* " in
*" -h "* | *" --help "*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH}
failed=()

check() {
    local name=$1
    shift
    if output=$("$@" 2>&1); then
        printf 'ok      %s\n' "$name"
    else
        printf 'FAILED  %s\n%s\n' "$name" "$output"
        failed+=("$name")
    fi
}

check "format" "$python" -m ruff format --check .
check "lint" "$python" -m ruff check .
check "types" "$python" -m mypy
check "patch set" "$python" -m dspark_pd list --check -v
check "generated docs" "$python" scripts/generate_docs.py --check
check "sizes" "$python" scripts/size_limits.py -v
for script in scripts/*.sh scripts/launch/*.sh; do
    check "syntax of $script" bash -n "$script"
done

if ((${#failed[@]})); then
    printf '%s of the checks failed: %s\n' "${#failed[@]}" "${failed[*]}" >&2
    exit 1
fi
