#!/usr/bin/env bash
# Builds a wheel of Horovod 0.28.1 with TensorFlow, MPI and Gloo.
#
#     scripts/build_horovod.sh PYTHON DIRECTORY
#
# PYTHON must have TensorFlow and the packages that scripts/requirements.txt lists for
# the build. The MPI is that of the first mpicxx on the PATH, else the one in PYTHON's
# environment. The changes to Horovod's sources are in patches/, each with its reason.
# Takes some two minutes on two cores.
#
#     HOROVOD_GPU_OPERATIONS=NCCL   for NVIDIA GPUs, with the CUDA of HOROVOD_CUDA_HOME or
#                                   of the nvcc on the PATH, and with TensorFlow's NCCL or
#                                   the one of HOROVOD_NCCL_HOME. Not yet run on a GPU.
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

die() {
  echo "build_horovod: error: $*" >&2
  exit 1
}

if (($# != 2)); then
  echo "usage: $0 PYTHON DIRECTORY" >&2
  exit 2
fi
patches=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../hvdtrain/installer/patches
mkdir -p "$2"
directory=$(cd "$2" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/build-horovod.XXXXXX")
trap 'rm -rf "$work"' EXIT

# CMake fails where PYTHON's path has spaces, hence the link.
prefix=$("$1" -c 'import sys; print(sys.prefix)')
ln -s "$prefix" "$work/python"
python=$work/python/bin/python3
export PATH="$PATH:$work/python/bin"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# English messages: scripts/first_errors.sh matches them.
export LC_ALL=C
# Variables of Horovod's runtime that its build would compile in as defaults.
unset HOROVOD_CPU_OPERATIONS HOROVOD_LOCAL_VERSION CCL_ROOT

# Horovod needs CMake 3.13, its CUDA kernels 3.18, and make or ninja. What is missing is
# downloaded for this build.
tools=()
cmake_version=$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }') || true
if [[ $(printf '%s\n' 3.18 "${cmake_version:-0}" | sort -V | head -n 1) != 3.18 ]]; then
  tools+=(cmake==3.31.10)
fi
if ! command -v make >/dev/null; then
  tools+=(ninja==1.13.2)
  export CMAKE_GENERATOR=Ninja
fi
if ((${#tools[@]})); then
  "$python" -m venv "$work/tools"
  "$work/tools/bin/python" -m pip install "${tools[@]}"
  export PATH="$work/tools/bin:$PATH"
fi

cd "$work"
echo "horovod==$version --hash=sha256:$sha256" >requirements.txt
"$python" -m pip download --no-deps --no-binary :all: --no-build-isolation \
  --require-hashes -r requirements.txt
tar -xzf "horovod-$version.tar.gz"
# --fuzz=0: every line of context must match. grep: patch accepts an empty file.
for file in "$patches"/*.patch; do
  { grep -q '^@@ ' "$file" &&
    patch --directory="horovod-$version" -p1 --fuzz=0 --batch --forward <"$file"; } ||
    die "${file##*/} does not apply to Horovod $version"
done

# The bundled gloo and flatbuffers require CMake 2.8; CMake 4 refuses that by default.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
# A relative rpath to <prefix>/lib, where an MPI inside the environment is: the library is
# <prefix>/lib/pythonX.Y/site-packages/horovod/tensorflow/mpi_lib.so. The backslash is
# for Ninja, which links through a shell; it does not disturb make.
# shellcheck disable=SC2016
rpath='\$ORIGIN/../../../..'
if [[ -n ${HOROVOD_GPU_OPERATIONS:-} ]]; then
  # Horovod reads the list of architectures from the nvcc on the PATH, but compiles with
  # that of HOROVOD_CUDA_HOME: make them the same.
  export PATH="${HOROVOD_CUDA_HOME:+$HOROVOD_CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin"
fi
if [[ ${HOROVOD_GPU_OPERATIONS:-} == NCCL && -z ${HOROVOD_NCCL_HOME:-} ]]; then
  # TensorFlow's NCCL: a second copy would allocate its own buffers on the GPU. The wheel
  # lacks libnccl.so, the name that -lnccl resolves to.
  nccl=$(echo "$prefix"/lib/python3*/site-packages/nvidia/nccl)
  [[ -e $nccl/lib/libnccl.so.2 ]] ||
    die "no NCCL in $prefix: install scripts/requirements_gpu.txt," \
      "or set HOROVOD_NCCL_HOME"
  ln -sf libnccl.so.2 "$nccl/lib/libnccl.so"
  export HOROVOD_NCCL_HOME=$nccl HOROVOD_NCCL_LINK=SHARED
  # shellcheck disable=SC2016
  rpath+=':\$ORIGIN/../../nvidia/nccl/lib'
fi
export LDFLAGS="${LDFLAGS:-} -Wl,-rpath,$rpath"
# Horovod starts eight compilers on any machine unless MAKEFLAGS sets a number.
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
"$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir wheels \
  "./horovod-$version"
mv wheels/horovod-*.whl "$directory"
