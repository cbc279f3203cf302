#!/usr/bin/env bash
# Runs the native collectives under ThreadSanitizer, then under AddressSanitizer and
# UndefinedBehaviorSanitizer: ranks that are threads of one process, which loads no
# TensorFlow. After scripts/setup.sh, whose TensorFlow has the headers.
#
#     scripts/sanitize.sh [thread] [address]      (both)
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
cd "$root"
export PATH="${HVDTRAIN_ENVIRONMENT:-$root/.venv}/bin:$PATH"

# One host; two that are alike; hosts of different numbers of ranks; so many that not all
# are connected.
ones="1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1"
jobs=("2" "4" "2 2" "3 2" "1 1 2" "1 $ones" "$ones 2 1")
sources=(hvdtrain/native/{dtypes,gathering,hosts,links,mismatch,reduction,ring,rounds,segment}.cc)
kinds=("$@")
((${#kinds[@]})) || kinds=(thread address)

# Old versions of ThreadSanitizer need addresses that are not randomized, which containers
# may forbid.
plain=(setarch --addr-no-randomize)
"${plain[@]}" true 2>/dev/null || plain=()

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Found without an import, which takes seconds.
find='import importlib.util as u; print(*u.find_spec("tensorflow").submodule_search_locations)'
headers=$(python -c "$find")
# Functions of the headers that are not called need TensorFlow's library.
options=(-std=c++17 -O1 -g -fno-omit-frame-pointer -w -DEIGEN_MAX_ALIGN_BYTES=64 -pthread
  -isystem "$headers/include" -Ihvdtrain/native -ffunction-sections
  -Wl,--gc-sections -Wl,--wrap=mmap,--wrap=munmap)
for kind in "${kinds[@]}"; do
  case $kind in
    thread) flags=(-fsanitize=thread) ;;
    address) flags=("-fsanitize=address,undefined" -fno-sanitize-recover=all) ;;
    *)
      echo "sanitize: received '$kind'; there are thread and address" >&2
      exit 2
      ;;
  esac
  "${CXX:-c++}" "${options[@]}" "${flags[@]}" -o "$work/$kind" scripts/sanitize/ranks.cc \
    "${sources[@]}"
  for job in "${jobs[@]}"; do
    echo "$kind: hosts of $job ranks"
    # shellcheck disable=SC2086
    TSAN_OPTIONS=halt_on_error=1 timeout 90 "${plain[@]}" "$work/$kind" $job
  done
done
