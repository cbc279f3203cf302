# shellcheck shell=bash
# Shared by debian_test.sh, docker_test.sh and slurm_test.sh, which source it. They set
# `title`, `install` (--install or nothing) and `packages` before, and `work`, a directory
# for output, before they install or check anything.

die() {
  echo "$title: $*" >&2
  exit 1
}

# A missing requirement skips the test; with --install it is an error.
skip() {
  [[ -z $install ]] || die "$*"
  echo "$title: skipped: $*"
  exit 0
}

install_packages() {
  echo "$title: apt-get install ${packages[*]}"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes \
    --no-install-recommends "${packages[@]}"; } </dev/null >"$work/apt.log" 2>&1 ||
    { tail -n 5 "$work/apt.log" >&2 && die "apt-get failed"; }
}

# wait_for SECONDS COMMAND...: until it succeeds.
wait_for() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || return 1
    sleep 1
  done
}

passed=0
failed=0

# check TEXT COMMAND...: prints one line; if the command fails, also the ends of its
# output and of the logs in `logs`, by default in `work`.
check() {
  local text=$1 start=$SECONDS status=0
  shift
  "$@" >"$work/output" 2>&1 || status=$?
  if ((status == 0)); then
    echo "$title: passed: $text, $((SECONDS - start)) s"
    passed=$((passed + 1))
  else
    echo "$title: FAILED: $text (exit code $status): $*"
    tail -n 40 "$work/output"
    tail -v -n 15 "${logs:-$work}"/*.log 2>/dev/null || true
    failed=$((failed + 1))
  fi
}

# The last line, and the exit code.
report() {
  echo "$passed passed, $failed failed"
  ((failed == 0))
}
