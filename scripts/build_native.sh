#!/usr/bin/env bash
# Builds libhvdtrain.so, the native operations, for the TensorFlow that PYTHON has.
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
  version = f"-DHVDTRAIN_TENSORFLOW=\"{tensorflow.__version__}\""
  print(*tensorflow.sysconfig.get_compile_flags(), version)
  print(*tensorflow.sysconfig.get_link_flags())')
# -isystem: no warnings from TensorFlow's headers.
read -ra compile <<<"${flags//-I/-isystem}"
read -ra link < <(tail -n 1 <<<"$flags")
# shellcheck disable=SC2086
${CXX:-c++} "${compile[@]}" -Wall -Wextra -O3 -fPIC -fvisibility=hidden -shared \
  "$root"/hvdtrain/native/*.cc -o "$2/libhvdtrain.so" "${link[@]}" ${LDFLAGS:-}
