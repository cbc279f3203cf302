#!/usr/bin/env bash
# Builds the native operations for the TensorFlow that PYTHON has, whose version is in
# the library's name: libhvdtrain-tensorflow-VERSION.so.
#
#     scripts/build_native.sh PYTHON DIRECTORY
#
# It belongs in lib/ of the Python environment. The sources are in hvdtrain/native.
# Takes half a minute on one core.
set -euo pipefail

if (($# != 2)); then
  echo "usage: $0 PYTHON DIRECTORY" >&2
  exit 2
fi
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
flags=$(TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES='' "$1" -c 'if 1:
  import tensorflow
  print(*tensorflow.sysconfig.get_compile_flags())
  print(*tensorflow.sysconfig.get_link_flags())
  print(f"libhvdtrain-tensorflow-{tensorflow.__version__}.so")')
# -isystem: no warnings from TensorFlow's headers.
read -ra compile <<<"${flags//-I/-isystem}"
{ read -r && read -ra link && read -r library; } <<<"$flags"
# shellcheck disable=SC2086
${CXX:-c++} "${compile[@]}" -Wall -Wextra -O3 -fPIC -fvisibility=hidden -shared \
  "$root"/hvdtrain/native/*.cc -o "$2/$library" "${link[@]}" ${LDFLAGS:-}
