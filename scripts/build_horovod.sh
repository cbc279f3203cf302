#!/usr/bin/env bash
# Builds a wheel of Horovod 0.28.1 with TensorFlow, MPI and Gloo.
#
#     scripts/build_horovod.sh PYTHON DIRECTORY
#
# PYTHON already has TensorFlow and the packages that scripts/requirements.txt names
# for the build. The MPI is the one whose mpicxx comes first on the PATH, or lies beside
# PYTHON. Takes some two minutes on two cores.
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

if (($# != 2)); then
  echo "usage: $0 PYTHON DIRECTORY" >&2
  exit 2
fi
mkdir -p "$2"
directory=$(cd "$2" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/build-horovod.XXXXXX")
trap 'rm -rf "$work"' EXIT

# CMake and the MPI compiler stumble over spaces in paths, hence the link.
prefix=$("$1" -c 'import sys; print(sys.prefix)')
ln -s "$prefix" "$work/python"
python=$work/python/bin/python3
export PATH="$PATH:$work/python/bin"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Horovod wants CMake 3.13, and make or ninja: fetched for this build where missing.
tools=()
cmake_version=$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }') || true
if [[ $(printf '%s\n' 3.13 "${cmake_version:-0}" | sort -V | head -n 1) != 3.13 ]]; then
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
# It serves XLA on GPUs alone, and needs headers that TensorFlow's wheel has no more.
sed -i '/xla_mpi_ops\.cc/d' "horovod-$version/horovod/tensorflow/CMakeLists.txt"

# Under Gloo the list of ranks has no size, so that no stalled rank is ever found.
sed -i 's/global_ranks_\.reserve(size_)/global_ranks_.resize(size_)/' \
  "horovod-$version/horovod/common/gloo/gloo_controller.cc"

# horovodrun leaves a signal that it receives to a shell, and mpirun goes on; it shows a
# trace of itself when a job under Gloo fails, and what TensorFlow's C++ says in
# processes that only look for Horovod's extensions.
(
  cd "horovod-$version/horovod"
  sed -i "s/'-c', mpirun_command\]/'-c', 'exec ' + mpirun_command]/" runner/mpi_run.py
  sed -i 's/^    _run(args)$/    try:\n        _run(args)\n    except RuntimeError as error:\n'\
'        raise SystemExit(f"horovodrun: {error}")/' runner/launch.py
  sed -i 's/^\( *\)# Suppress output$/\1os.dup2(os.open(os.devnull, os.O_WRONLY), 2)/' \
    common/util.py
)

# An argument for make that ninja takes for a target.
[[ ${CMAKE_GENERATOR:-} != Ninja ]] ||
  sed -i "s/make_args.append('VERBOSE=1')/pass/" "horovod-$version/setup.py"

# The bundled gloo and flatbuffers ask for CMake 2.8, which CMake 4 refuses by default.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
# An MPI inside the environment is found wherever the environment lies: the library is
# <prefix>/lib/pythonX.Y/site-packages/horovod/tensorflow/mpi_lib.so. The backslash is
# for Ninja, which links through a shell; make does as well with it.
# shellcheck disable=SC2016
export LDFLAGS="${LDFLAGS:-} "'-Wl,-rpath,\$ORIGIN/../../../..'
# Horovod would start eight compilers whatever the machine, unless MAKEFLAGS says less.
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
"$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir wheels \
  "./horovod-$version"
mv wheels/horovod-*.whl "$directory"
