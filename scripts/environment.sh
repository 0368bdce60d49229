# Sourced by demo.sh and test.sh: makes the environment that engines run in.
#
# prepare_environment  creates the virtual environment, installs the pinned
#                      requirements and the two packages of this repository, and
#                      applies the patch set to the SGLang inside. Idempotent: a
#                      second call with nothing changed takes about a second.
#
# DSPARK_PD_VENV   where the environment lies (default: .venv in the repository)
# PYTHON           interpreter to build it with (default: the first of python3,
#                  python3.11, python3.12, python3.13 that is 3.11 to 3.13)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${DSPARK_PD_VENV:-$ROOT/.venv}"
REQUIREMENTS="$ROOT/requirements/engine-0.5.23.txt"
INSTALL_LOG="$VENV/install.log"
STAMP="$VENV/.installed"
NEEDED_DISK_GIB=9

say() { printf '[setup] %s\n' "$*" >&2; }

# refuse SUMMARY NEXT-STEP: one message, exit 2.
refuse() {
  printf '\nerror: %s\n  next: %s\n' "$1" "$2" >&2
  exit 2
}

suits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
    2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if suits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  refuse "no Python 3.11, 3.12 or 3.13 found (looked for: ${PYTHON:-python3, python3.11 to python3.13})" \
    "install one, or name it: PYTHON=/path/to/python3.11 $0"
}

check_machine() {
  local free
  [ "$(uname -s)" = Linux ] ||
    refuse "SGLang engines need Linux, this is $(uname -s)" "run it in a Linux machine or container"
  free=$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$free" -ge "$NEEDED_DISK_GIB" ] ||
    refuse "$free GiB of disk free at $(dirname "$VENV"), $NEEDED_DISK_GIB needed (PyTorch is most of it)" \
      "free some space, or put the environment elsewhere: DSPARK_PD_VENV=/big/disk/venv $0"
}

make_venv() {
  local python
  python=$(find_python) || exit 2
  say "creating $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV" ||
    refuse "could not create a virtual environment" "on Debian: apt-get install python3-venv"
}

# False when there is none, or when making it was interrupted.
venv_is_whole() {
  suits "$VENV/bin/python" &&
    { [ -f "$STAMP" ] || "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }
}

# Shows the large downloads and the end of the run, keeps everything in the log.
run_pip() {
  "$VENV/bin/python" -m pip --disable-pip-version-check install \
    --progress-bar off --no-deps "$@" 2>&1 | tee -a "$INSTALL_LOG" |
    { grep --line-buffered -E '\(([0-9]{2,}\.[0-9]+ M|[0-9.]+ G)B\)|^Installing collected|^ERROR' || true; } |
    while IFS= read -r line; do say "  ${line:0:96}"; done
  [ "${PIPESTATUS[0]}" -eq 0 ] || {
    tail -n 15 "$INSTALL_LOG" >&2
    refuse "pip could not install $*" "see $INSTALL_LOG; pip's own settings decide where it looks"
  }
}

# Changes whenever something that decides what is installed changes.
fingerprint() {
  cat "$REQUIREMENTS" "$ROOT/pyproject.toml" "$ROOT/python/sglang_cpu_reference/pyproject.toml" |
    sha256sum | cut -d' ' -f1
  "$VENV/bin/python" -VV
  printf '%s\n' "$ROOT"
}

install_packages() {
  if [ -f "$STAMP" ] && [ "$(fingerprint)" = "$(cat "$STAMP")" ]; then
    return
  fi
  rm -f "$STAMP"
  : >"$INSTALL_LOG"
  say "installing pinned requirements (about 6 GiB; minutes the first time)"
  run_pip -r "$REQUIREMENTS"
  say "installing dspark-pd and the CPU reference platform"
  run_pip -e "$ROOT" -e "$ROOT/python/sglang_cpu_reference"
  fingerprint >"$STAMP"
}

apply_patch_set() {
  local status=0
  "$VENV/bin/dspark-pd" apply --component all -q >"$VENV/apply.log" 2>&1 || status=$?
  [ "$status" -eq 0 ] && return
  cat "$VENV/apply.log" >&2
  printf '\nerror: the patch set could not be applied (exit %s); SGLang is as it was\n' "$status" >&2
  printf '  next: %s/bin/dspark-pd status\n' "$VENV" >&2
  exit "$status"
}

prepare_environment() {
  mkdir -p "$(dirname "$VENV")"
  # Two runs at once must not install into one environment at the same time.
  exec 9>"$VENV.lock"
  flock -w 1200 9 || refuse "another set-up of $VENV runs for 20 minutes" "stop it, then run again"
  if ! venv_is_whole; then
    check_machine
    make_venv
  fi
  install_packages
  apply_patch_set
  exec 9>&-
}
