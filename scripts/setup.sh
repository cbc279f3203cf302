#!/usr/bin/env bash
# Makes .venv with TensorFlow, an MPI, Horovod and hvdtrain, without root.
#
#     scripts/setup.sh [--quiet]     --quiet: print nothing if nothing is to be done
#
# Safe to call at any time: it does nothing if nothing changed, and completes a call that
# was interrupted. Makes a virtual environment of the first python3 on the PATH, installs
# scripts/requirements.txt, and calls `python -m hvdtrain.install`, which reads the other
# variables and has the first mpicxx on the PATH as MPI.
#
#     PYTHON                  another Python, 3.11 to 3.13
#     HOROVOD_GPU_OPERATIONS  NCCL: TensorFlow with CUDA, and a Horovod for NVIDIA GPUs;
#                             needs CUDA's compiler. Compiled, not yet run on a GPU.
#
# Later calls keep the variables of Horovod's build that are not set again: after
# `HOROVOD_GPU_OPERATIONS=NCCL scripts/setup.sh`, `scripts/train.sh` trains on GPUs.
# `HOROVOD_GPU_OPERATIONS= scripts/setup.sh` goes back.
set -euo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
venv=$root/.venv
log=$venv.log
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME
# Do not use the Python or MPI of another environment that is active.
[[ -z ${VIRTUAL_ENV:-} ]] || PATH=${PATH//"$VIRTUAL_ENV/bin:"/}

die() {
  echo "set-up: $*" >&2
  exit 1
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
    "install python3 of your system, or set PYTHON to the path of another"
}

check_venv_module() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null || die "Python's venv module is" \
    "missing: install python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" \
    "(Debian) or python3-libs (Red Hat)"
}

# The MPI compiler on the PATH that is not .venv's own; nothing if there is none.
find_mpicxx() {
  local candidate
  while read -r candidate; do
    if [[ $(readlink -f "$candidate") != "$venv"/* ]]; then
      echo "$(readlink -f "$candidate") $("$candidate" -show 2>&1 | cksum)"
      return
    fi
  done < <(type -aP mpicxx)
}

# Exports the variables of Horovod's build that the last call had, except those that the
# environment sets, even to ''.
keep_variables() {
  local variable
  [[ -e $venv/.horovod ]] || return 0
  while read -r variable; do
    [[ -v ${variable%%=*} ]] || export "${variable?}"
  done <"$venv/.horovod"
}
variables() {
  env | grep -E '^HOROVOD_(ALLOW|BUILD|CMAKE|CUDA|DEBUG|GPU|NCCL|NVTX|ROCM|WITH)[A-Z_]*=.' |
    LC_ALL=C sort || true
}

requirements() {
  if [[ -z ${HOROVOD_GPU_OPERATIONS:-} ]]; then
    cat "$root/scripts/requirements.txt"
  else
    grep -v '^tensorflow' "$root/scripts/requirements.txt"
    cat "$root/scripts/requirements_gpu.txt"
  fi
}

# The packages that Horovod is built against or that hvdtrain hooks into, as installed.
installed() {
  (cd "$venv"/lib/python3*/site-packages 2>/dev/null &&
    echo {hvdtrain,keras,mpi4py,numpy,tensorflow,tensorflow_cpu}-*.dist-info)
}

digest() { cat "$@" | sha256sum | cut -c 1-12; }

# The inputs of the environment, one line each. If all are equal, only Horovod and the
# native operations may be out of date, which hvdtrain.install looks at.
describe() {
  echo "clone: $root"
  echo "python: $("$python" -VV | tr '\n' ' ')$python"
  echo "mpi: $(find_mpicxx)"
  echo "requirements: $(digest <(requirements))"
  echo "package: $(digest "$root"/{setup.cfg,pyproject.toml})"
  echo "installed: $(installed)"
}
is_complete() { [[ $(cat "$venv/.set-up" 2>/dev/null) == "$(describe)" ]]; }

# step TEXT COMMAND...: prints one line with the seconds it took; output goes to the log.
step() {
  local text=$1 start=$SECONDS status=0
  shift
  printf '%s ... ' "$text"
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  if ((status)); then
    echo "failed after $((SECONDS - start)) s (exit code $status):"
    grep -aiE '(error|fatal|no space left)\b' "$log" | tail -n 8 || tail -n 8 "$log"
    restore_venv
    die "$text failed; its output is in $log"
  fi
  echo "$((SECONDS - start)) s"
}

# A chain of &&: `set -e` has no effect in what `step` calls. An environment that works is
# kept until the new one is complete.
make_venv() {
  rm -rf "$venv.new" && mkdir "$venv.new" && touch "$venv.new/.set-up" &&
    variables >"$venv.new/.horovod" &&
    if [[ -s $venv/.set-up ]]; then
      rm -rf "$venv.old" && mv "$venv" "$venv.old"
    else
      rm -rf "$venv"
    fi && mv "$venv.new" "$venv" && "$python" -m venv "$venv"
}
restore_venv() { [[ ! -e $venv.old ]] || { rm -rf "$venv" && mv "$venv.old" "$venv"; }; }

# compat installs a path in a .pth file. With setuptools' import hook, a directory hvdtrain
# in the working directory, such as the clone, would hide the package.
install_packages() {
  requirements >"$venv/requirements.txt" &&
    "$venv/bin/python" -m pip install --no-deps -r "$venv/requirements.txt" &&
    "$venv/bin/python" -m pip install --no-deps --no-build-isolation \
      --config-settings editable_mode=compat -e "$root"
}

case $* in
  '' | --quiet) ;;
  *) die "unknown argument $*; usage: scripts/setup.sh [--quiet]" ;;
esac
python=$(find_python)
keep_variables

exec 9>"$venv.lock"
if ! flock -n 9; then
  echo "set-up: another set-up of this clone is running, waiting for it to end"
  flock 9
fi
if ! is_complete; then
  [[ ! -e $venv || -e $venv/.set-up ]] ||
    die "$venv was not made by this script; move it away and call again"
  check_venv_module
  : >"$log"
  step "making .venv" make_venv
  step "installing TensorFlow and the other packages" install_packages
  describe >"$venv/.set-up.new" && mv "$venv/.set-up.new" "$venv/.set-up"
  rm -rf "$venv.old"
fi
variables >"$venv/.horovod"
exec "$venv/bin/python" -m hvdtrain.install "$@" 9>&-
