#!/usr/bin/env bash
# Makes the files of a release from a clean clone: the directory that is uploaded.
#
#     scripts/release.sh DIR [--tensorflow=2.21]... [--python=3.11]... [--dirty]
#
# DIR, which must be new or empty, gets the source archive and the wheel of hvdtrain, the
# wheels of Horovod and of the native operations for each pair of TensorFlow and Python,
# the wheel of Open MPI that they need, SHA256SUMS, and index pages that pip reads.
#
#     --tensorflow    a line of TensorFlow; by default each of install/supported.py
#     --python        a version, or the path of a Python; by default each supported one
#                     that this machine has: on the PATH, of pyenv or of uv. A pair for
#                     which TensorFlow has no wheel is left out.
#     --dirty         with changes that are not committed, also new files
#
# Needs git, patch, binutils and debootstrap. Wheels need the C library 2.28 or later, on
# whatever machine they are built: scripts/debian11_compiler.sh brings the compiler. It and
# what was built are kept in HVDTRAIN_CACHE_DIR (~/.cache/hvdtrain).
set -euo pipefail

root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Wheels for everybody: no settings of this shell.
unset PYTHONPATH PYTHONHOME HVDTRAIN_WHEELS CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH
while read -r variable; do unset "$variable"; done < <(compgen -v HOROVOD_)
[[ -z ${VIRTUAL_ENV:-} ]] || PATH=${PATH//"$VIRTUAL_ENV/bin:"/}

die() {
  echo "release: $*" >&2
  exit 1
}

# step TEXT COMMAND...: prints one line with the seconds it took.
step() {
  local text=$1 start=$SECONDS status=0
  shift
  printf '%s ... ' "$text"
  "$@" >"$work/log" 2>&1 </dev/null || status=$?
  if ((status)); then
    echo failed
    tail -n 20 "$work/log"
    die "$text failed (exit code $status)"
  fi
  echo "$((SECONDS - start)) s"
}

check_clone() {
  local changes
  changes=$(git -C "$root" status --porcelain 2>/dev/null) ||
    die "$root is not a git clone: the files of a release are those of a commit"
  [[ -z $changes || -n $dirty ]] ||
    die "$root has changes that are not committed, such as${changes%%$'\n'*}:" \
      "commit them, or call with --dirty"
}

# A wheel for the MPI of this machine is made by `python -m hvdtrain.install --wheels`.
check_mpi() {
  local found
  if found=$(type -P mpicxx); then
    die "$found would be used as MPI; expected Open MPI from the package index:" \
      "take it off the PATH"
  fi
}

export_sources() {
  mkdir "$work/source"
  if [[ -z $dirty ]]; then
    git -C "$root" archive HEAD
  else
    (cd "$root" && git ls-files -z --cached --others --exclude-standard |
      tar --null --files-from=- --ignore-failed-read -c)
  fi | tar -C "$work/source" -x
  # Modes are part of a wheel, and depend on the umask of the clone.
  chmod -R u=rwX,go=rX "$work/source"
}

# supported EXPRESSION: what hvdtrain/install/supported.py says, with one Python.
supported() {
  (cd "$work/source" && "$1" -c "from hvdtrain.install.supported import *; $2")
}

# The base interpreter, so that no environment is part of the wheels; fails if it does
# not run or lacks venv.
base_of() {
  "$1" -c 'import ensurepip, sys, venv; print(sys._base_executable)' 2>/dev/null
}

# find_python VERSION: a shim of pyenv is on the PATH also where its Python is not chosen.
find_python() {
  local candidate
  while read -r candidate; do
    base_of "$candidate" && return
  done < <(
    type -aP "python$1"
    while read -r candidate; do
      compgen -G "${candidate%/shims/*}/versions/$1.*/bin/python$1"
    done < <(type -aP "python$1")
    compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1.*/bin/python$1"
    compgen -G "$HOME/.local/share/uv/python/cpython-$1.*/bin/python$1"
  )
  return 1
}

find_pythons() {
  local version
  for version in 3.11 3.12 3.13; do find_python "$version" || true; done
}

check_pythons() {
  local python base
  for python in "${pythons[@]}"; do
    if [[ $python =~ ^3\.[0-9]+$ ]]; then
      base=$(find_python "$python") || die "--python=$python: this machine has none with venv"
    else
      base=$(base_of "$python") || die "--python=$python does not run, or has no venv"
    fi
    supported "$base" 'import sys; sys.exit(
      not PYTHON[0] <= sys.version_info[:2] <= PYTHON[1])' ||
      die "--python=$python is $("$base" -V); expected a Python that hvdtrain supports"
    echo "$base"
  done
}

# The wheel is built from the source archive, and once more from the sources.
build_package() {
  "$1" -m venv "$work/tools" &&
    "$work/tools/bin/pip" install --quiet build==1.6.1 pyelftools==0.33 &&
    "$work/tools/bin/python" -m build --outdir "$files" "$work/source" &&
    "$work/tools/bin/python" -m build --wheel --outdir "$work/direct" "$work/source" &&
    cmp "$files"/hvdtrain-*.whl "$work"/direct/hvdtrain-*.whl
}

download_mpi() {
  "$work/tools/bin/pip" download --no-deps --only-binary=:all: --dest "$files" "$(
    cd "$work/source" &&
      "$1" -c 'from hvdtrain.install import mpi_library; print(mpi_library.PACKAGE)'
  )"
}

# In a directory for each version of the script: the cache has the path of the compiler in
# the digest of a wheel.
find_compiler() {
  local script=$work/source/scripts/debian11_compiler.sh cache version
  cache=$(cd "$work/source" &&
    "$1" -c 'from hvdtrain.install import cache; print(cache.directory())')
  version=$(sha256sum "$script")
  compiler=$cache/compilers/debian11-${version::12}
  [[ -x $compiler/c++ ]] || step "downloading the compiler of Debian 11" \
    "$script" "$compiler"
  export CC=$compiler/cc CXX=$compiler/c++
}

# make_environment PYTHON LINE: with TensorFlow and hvdtrain in it.
make_environment() {
  local package=tensorflow
  [[ $(uname -m) != x86_64 ]] || package=tensorflow-cpu
  rm -rf "$work/environment" && "$1" -m venv "$work/environment" &&
    { "$work/environment/bin/pip" install --only-binary=:all: "$package~=$2.0" \
      "$files"/hvdtrain-*.whl || grep -q 'No matching distribution' "$work/log"; }
}

# build_pair PYTHON LINE
build_pair() {
  local text
  text="TensorFlow $2 and $("$1" -V)"
  step "installing $text" make_environment "$@"
  if grep -q 'No matching distribution' "$work/log"; then
    echo "there is no wheel of $text: left out"
    return
  fi
  # Away from any directory named hvdtrain.
  (cd "$work/environment" && bin/python -m hvdtrain.install --wheels="$files") ||
    die "the wheels for $text could not be made"
  built=$((built + 1))
}

check_files() {
  (cd "$files" && sha256sum --quiet --check SHA256SUMS) &&
    "$work/tools/bin/python" "$work/source/scripts/check_release.py" "$files" \
      "$work/" "$root/" "$HOME/" hvdtrain-install.
}

lines=()
pythons=()
directory=''
dirty=''
for argument; do
  case $argument in
    --tensorflow=?*) lines+=("${argument#*=}") ;;
    --python=?*) pythons+=("${argument#*=}") ;;
    --dirty) dirty=1 ;;
    -*) die "unknown argument $argument; see the first lines of $0" ;;
    *) [[ -z $directory ]] && directory=$argument || die "expected one directory" ;;
  esac
done
[[ -n $directory ]] || die "usage: scripts/release.sh DIR [--tensorflow=2.21] [--python=3.11]"
[[ ! -e $directory || -d $directory && -z $(ls -A "$directory") ]] ||
  die "$directory exists and is not an empty directory"
check_clone
check_mpi
work=$(mktemp -d "${TMPDIR:-/tmp}/hvdtrain-release.XXXXXX")
trap 'rm -rf "$work"' EXIT
files=$work/files
mkdir -p "$files" "$directory"
export_sources
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct)
export SOURCE_DATE_EPOCH
# Two steps: `set -e` has no effect in a process substitution.
found=$(if ((${#pythons[@]})); then check_pythons; else find_pythons; fi)
mapfile -t pythons <<<"$found"
[[ -n $found ]] || die "no Python 3.11, 3.12 or 3.13 with venv is found: see --python"
known=$(supported "${pythons[0]}" 'print(*map(text, TENSORFLOW), sep="\n")')
((${#lines[@]})) || mapfile -t lines <<<"$known"
for line in "${lines[@]}"; do
  grep -qxF "$line" <<<"$known" ||
    die "--tensorflow=$line; expected one of" $known
done

step "building the source archive and the wheel of hvdtrain" build_package "${pythons[0]}"
step "downloading Open MPI" download_mpi "${pythons[0]}"
find_compiler "${pythons[0]}"
built=0
for line in "${lines[@]}"; do
  for python in "${pythons[@]}"; do build_pair "$python" "$line"; done
done
((built)) || die "TensorFlow has no wheel for any of these pairs"
step "checking the files" check_files
cp -R "$files/." "$directory"
(cd "$directory" && ls -l -- *.whl *.tar.gz)
echo "release: $directory has the files of $(git -C "$root" describe --always --dirty)"
