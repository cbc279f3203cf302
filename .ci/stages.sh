# shellcheck shell=bash
# Runs the stages of CI, for .ci/run, which sets `last_end`: the second at which the last
# stage has to have ended.

output=$(mktemp)
trap 'rm -f "$output"' EXIT
# Seconds from the signal at a stage's limit to its end.
grace=60
summary=()
# The command and the end of its output, for each one that failed.
failures=()

# In namespaces of its own: all processes and mounts of a stage end with it, also daemons
# that ignore signals. The shell, as process 1, would ignore the signal at the limit; the
# command, its child, ends by it and cleans up.
alone=()
# shellcheck disable=SC2016
! unshare --pid --fork --mount-proc true 2>/dev/null ||
  alone=(unshare --pid --fork --kill-child --mount-proc sh -c '"$@"; exit' sh)

# Seconds for which the cores were busy since the machine has started, of all cores.
busy() {
  awk -v rate="$(getconf CLK_TCK)" \
    '/^cpu /{print int(($2 + $3 + $4 + $7 + $8) / rate)}' /proc/stat
}

# since SECONDS BUSY: the seconds since then, and how busy the cores were in them.
since() {
  local seconds=$((SECONDS - $1)) used=$(($(busy) - $2))
  printf '%4d s %3d %%' "$seconds" $((100 * used / (seconds * $(nproc) + 1)))
}

began=$(busy)

# run SECONDS COMMAND...: the others run also where one fails. A command that may end too
# late on a slow machine is left out.
run() {
  local limit=$1 start=$SECONDS before result=passed status=0
  before=$(busy)
  shift
  if ((start + limit > last_end)); then
    summary+=("   -         $* LEFT OUT after $start s: no time is left")
    return
  fi
  # A lane is a background job of this shell, which would ignore Ctrl-C: tests send it.
  env --default-signal=INT,QUIT timeout -k "$grace" "$limit" "${alone[@]}" "$@" 2>&1 |
    tee "$output" || status=$?
  if ((status)); then
    failures+=("$*" "$(tail -n 30 "$output")")
    result="FAILED (exit code $status)"
    ((status != 124 && status != 137)) || result="timed out after $limit s"
  fi
  summary+=("$(since "$start" "$before")  $* $result")
}

# beside LANES...: functions that run stages, at the same time. The output of each follows
# when it has ended.
beside() {
  local directory lane processes=()
  directory=$(mktemp -d)
  for lane; do
    (
      summary=() failures=() output=$directory/$lane.last
      "$lane"
      printf '%s\0' "${summary[@]}" >"$directory/$lane.summary"
      ((${#failures[@]} == 0)) ||
        printf '%s\0' "${failures[@]}" >"$directory/$lane.failures"
    ) >"$directory/$lane.output" 2>&1 &
    processes+=($!)
  done
  wait "${processes[@]}"
  for lane; do
    cat "$directory/$lane.output"
    mapfile -d '' -t -O "${#summary[@]}" summary <"$directory/$lane.summary"
    [[ ! -e $directory/$lane.failures ]] ||
      mapfile -d '' -t -O "${#failures[@]}" failures <"$directory/$lane.failures"
  done
  rm -rf "$directory"
}

# Prints the ends of the outputs of failed stages, then the seconds of all, and the share
# of them for which the cores were busy, also with other stages. Fails if one has failed.
report() {
  ((${#failures[@]} == 0)) || printf '\nci: FAILED: %s\n%s\n' "${failures[@]}"
  printf '\n'
  printf 'ci: %s\n' "${summary[@]}" "$(since 0 "$began")  in all"
  ((${#failures[@]} == 0))
}
