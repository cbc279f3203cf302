#!/usr/bin/env bash
# Runs `scripts/test.sh keras` on pairs of TensorFlow and Keras, each in an environment of
# its own, and prints a table of the results.
#
#     scripts/matrix.sh [TENSORFLOW KERAS]...      (all supported lines of TensorFlow,
#                                                   with the first and the last Keras)
#
# A pair takes some eight minutes on two cores, two of them to build Horovod, whose wheels
# stay in the cache.
#
#     HVDTRAIN_MATRIX_DIR   keeps environments and logs there; default: a directory that
#                           is removed
set -uo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
cd "$root" || exit
pairs=("$@")
if ((${#pairs[@]} == 0)); then
  for tensorflow in 2.18.1 2.19.1 2.20.0 2.21.0; do
    pairs+=("$tensorflow" 3.12.0 "$tensorflow" 3.15.1)
  done
fi
if ((${#pairs[@]} % 2)); then
  echo "usage: $0 [TENSORFLOW KERAS]..." >&2
  exit 2
fi
directory=${HVDTRAIN_MATRIX_DIR:-}
if [[ -z $directory ]]; then
  directory=$(mktemp -d)
  trap 'rm -rf "$directory"' EXIT
fi
mkdir -p "$directory" && directory=$(cd "$directory" && pwd) || exit
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
processor=
[[ $(uname -m) != x86_64 ]] || processor=-cpu

# environment DIRECTORY TENSORFLOW KERAS: pip checks their ranges against setup.cfg's.
environment() {
  "${PYTHON:-python3}" -m venv "$1" &&
    "$1/bin/python" -m pip install --quiet --editable "$root[cpu,mpi,plot]" \
      "tensorflow$processor==$2" "keras==$3" pytest pytest-xdist &&
    PATH=$1/bin:$PATH "$1/bin/python" -m hvdtrain.install
}

# count NTH LOG: the tests that passed and failed in the NTH run of pytest.
count() {
  grep -aoE '([0-9]+ failed, )?[0-9]+ (passed|failed|errors?)\>' "$2" | sed -n "${1}p"
}

# pair TENSORFLOW KERAS: one line of the table.
pair() {
  local name=tensorflow-$1-keras-$2 start=$SECONDS result=passed
  local log=$directory/$name.log
  if ! environment "$directory/$name" "$1" "$2" >"$log" 2>&1; then
    tail -n 20 "$log"
    result='no environment'
  elif ! HVDTRAIN_ENVIRONMENT=$directory/$name scripts/test.sh keras >>"$log" 2>&1; then
    grep -aE '^FAILED|^ERROR|^E  ' "$log" | head -n 40
    result=FAILED
  fi
  [[ $result == passed ]] || failed=1
  table+=("| $1 | $2 | $(count 1 "$log") | $(count 2 "$log") | $result |")
  echo "TensorFlow $1, Keras $2: $result, $((SECONDS - start)) s"
}

failed=0
table=('| TensorFlow | Keras | unit tests | oracle tests, two ranks | |' '|---|---|---|---|---|')
for ((i = 0; i < ${#pairs[@]}; i += 2)); do
  pair "${pairs[i]}" "${pairs[i + 1]}"
done
printf '%s\n' "${table[@]}"
exit "$failed"
