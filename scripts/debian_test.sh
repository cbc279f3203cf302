#!/usr/bin/env bash
# Installs in bare Debians, as a user without root, and trains.
#
#     scripts/debian_test.sh [--install] [trixie] [testing] [gpu]
#                            [wheels_bullseye] [wheels_bookworm] [wheels_trixie]  (all six)
#
# trixie, testing and gpu run the README's first commands in a clone, beside a C++
# compiler, patch and Python 3.13. trixie is Debian 13; testing has the newest compiler and
# C library; gpu, in Debian 13, compiles Horovod for NVIDIA GPUs and loads it, on a machine
# that may have none. Horovod is built there. pip has the downloads of this machine's
# cache, which all parts share, and downloads the others.
#
# wheels_bookworm (Debian 12, Python 3.11) and wheels_trixie (Debian 13, Python 3.13) have
# Python alone, neither compiler, patch nor ssh, and install release files: those of
# HVDTRAIN_RELEASE, or of scripts/release.sh, which builds what is not in the cache of this
# machine. They print the seconds of pip and of the training. wheels_bullseye is Debian 11,
# whose C library is 2.31, with the Python 3.13 of Debian 13, compiled in a Debian 11 apart.
#
# Needs root and debootstrap; --install installs debootstrap with apt-get.
#
#     HVDTRAIN_RELEASE     a directory of release files
#     HVDTRAIN_MNIST_DIR   has mnist.npz, which is copied into the Debians; without it the
#                          trainings read the digits that hvdtrain ships with
#     PIP_CONFIG_FILE, PIP_INDEX_URL, SSL_CERT_FILE, http_proxy, https_proxy, no_proxy
#         are also used inside the Debians
set -euo pipefail

title='debian test'
packages=(debootstrap)
install=''
if [[ ${1:-} == --install ]]; then
  install=$1
  shift
fi
parts=("$@")
((${#parts[@]})) || parts=(trixie testing gpu wheels_bullseye wheels_bookworm wheels_trixie)
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
# shellcheck source=scripts/testing.sh
source "$root/scripts/testing.sh"
clone=/home/somebody/hvdtrain
quick=(-np 2 --dataset=digits --max_steps=400)

check_machine() {
  ((EUID == 0)) || skip "it needs root, for debootstrap and chroot"
  unshare --mount --pid --fork true 2>/dev/null || skip "no namespaces may be made here"
  command -v debootstrap >/dev/null && return
  [[ -n $install ]] || skip "debootstrap is missing (see --install)"
  install_packages
}

# inside COMMAND...: as root in the Debian. The shell is process 1 of the namespace, so
# that all processes are killed when it exits; `timeout` of coreutils 9.10 fails as
# process 1.
inside() {
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child sh -c '
    mount -t proc proc "$1/proc" && mount -t sysfs -o ro sysfs "$1/sys" &&
      mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm" &&
      if [ -d "$1/home/somebody/.cache/pip" ]; then
        mount --bind "$0" "$1/home/somebody/.cache/pip"
      fi && chroot "$@"
    exit' \
    "$work/pip" "$debian" env -i LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    DEBIAN_FRONTEND=noninteractive "${site[@]}" "$@"
}

# as_user SECONDS COMMAND...: in the directory $here of the Debian.
as_user() {
  inside timeout -k 30 "$1" setpriv --reuid=somebody --regid=somebody --clear-groups \
    env -C "$here" HOME=/home/somebody "${@:2}"
}

# What this machine needs to reach a package index: variables, and files in /etc/site.
find_site() {
  local name certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
  site=()
  for name in http_proxy https_proxy no_proxy PIP_INDEX_URL; do
    [[ -z ${!name:-} ]] || site+=("$name=${!name}")
  done
  mkdir "$work/site"
  if [[ -e $certificates ]]; then
    cp "$certificates" "$work/site/ca.crt"
    site+=(PIP_CERT=/etc/site/ca.crt SSL_CERT_FILE=/etc/site/ca.crt)
  fi
  if [[ -e ${PIP_CONFIG_FILE:-} ]]; then
    cp "$PIP_CONFIG_FILE" "$work/site/pip.conf"
    site+=(PIP_CONFIG_FILE=/etc/site/pip.conf)
  fi
}

# A copy of the downloads in this user's cache, which pip of another user would not use.
copy_downloads() {
  local downloads
  mkdir -p "$work/pip"
  downloads=$(python3 -m pip cache dir 2>/dev/null) || return 0
  [[ ! -d $downloads ]] || cp -R --reflink=auto "$downloads/." "$work/pip"
}

# Chains of &&: `set -e` has no effect in a function whose exit code the caller tests.
# install_base SUITE: the Debian $debian, without any package for a test.
install_base() {
  # A mirror may serve package lists that have expired.
  debootstrap --variant=minbase "$1" "$debian" &&
    cp -rL /etc/resolv.conf "$work/site" "$debian/etc" &&
    # Debian's installer and container engines write it; debootstrap does not. Gloo needs
    # an address of the host's name.
    printf '%s\n' '127.0.0.1 localhost' "127.0.1.1 $(uname -n)" >"$debian/etc/hosts" &&
    echo 'Acquire::Check-Valid-Until "false";' >"$debian/etc/apt/apt.conf.d/90mirror" &&
    inside apt-get update &&
    inside useradd --create-home --uid 1000 somebody &&
    inside install -d -o somebody -g somebody /home/somebody/.cache{,/pip} &&
    inside chown -R somebody: /home/somebody
}

# make_base SUITE: shared by the Debians of a suite, unless it exists.
make_base() {
  debian=$work/$1.base
  [[ -d $debian ]] || install_base "$1" >"$work/$1.log" 2>&1 ||
    { tail -n 5 "$work/$1.log" >&2 && die "debootstrap or apt-get failed for $1"; }
}

# make_debian NAME SUITE PYTHON PACKAGE...: the Debian $debian, unless it exists.
make_debian() {
  local start=$SECONDS
  if [[ -d $work/$1 ]]; then
    debian=$work/$1
    return
  fi
  make_base "$2"
  cp -a --reflink=auto "$debian" "$work/$1"
  debian=$work/$1
  inside apt-get install --yes --no-install-recommends "${@:4}" >"$work/$1.log" 2>&1 ||
    { tail -n 5 "$work/$1.log" >&2 && die "apt-get failed for $1"; }
  # shellcheck disable=SC2016
  inside sh -c '. /etc/os-release && echo "$1: $PRETTY_NAME; $("$2" --version);" \
    "$(g++ --version 2>/dev/null | head -n 1)"' sh "$title" "$3"
  echo "$title: made in $((SECONDS - start)) s"
}

copy_clone() {
  mkdir "$debian$clone"
  tar -C "$root" --exclude='./.git' --exclude='./.venv*' -c . | tar -C "$debian$clone" -x
  inside chown -R somebody: /home/somebody
}

# make_machine SUITE: a Debian with a clone in it, unless it exists.
make_machine() {
  here=$clone
  make_debian "$1" "$1" python3.13 g++ patch python3.13-venv
  [[ -d $debian$clone ]] || copy_clone
}

names_a_patch_that_does_not_apply() {
  local patches=$debian$clone/hvdtrain/install/patches status=0
  cp "$patches"/01-*.patch "$patches/00-twice.patch"
  as_user 300 .venv/bin/python -m hvdtrain.install --replace |& tee "$work/said" ||
    status=$?
  rm "$patches/00-twice.patch"
  ((status == 1)) && grep -q '/01-.*.patch does not apply to Horovod' "$work/said"
}

shows_the_error_of_the_compiler() {
  local status=0
  as_user 300 env HVDTRAIN_CACHE_DIR=/tmp/empty HOROVOD_DEBUG=1 \
    CXXFLAGS='-include no_such.h' scripts/setup.sh |& tee "$work/said" || status=$?
  ((status == 1)) && grep -q 'fatal error: no_such.h' "$work/said"
}

trains() {
  check "$1: the README's first command sets up and trains" \
    as_user 1200 ./scripts/train.sh "${quick[@]}"
}

gives_the_right_numbers() {
  # shellcheck disable=SC2016
  check "$1: collectives and optimizers give the right numbers" as_user 600 sh -c \
    'PATH=$PWD/.venv/bin:$PATH horovodrun -np 2 python -m pytest -q -p no:cacheprovider \
      -m "not long and not release" tests/parallel/test_collectives.py \
      tests/parallel/test_optimizer.py'
}

trixie() {
  make_machine trixie
  trains trixie
  gives_the_right_numbers trixie
  check "trixie: a patch that does not apply ends the build" \
    names_a_patch_that_does_not_apply
  check "trixie: set-up shows the compiler's error" shows_the_error_of_the_compiler
}

testing() {
  make_machine testing
  trains testing
  gives_the_right_numbers testing
}

# CUDA's compiler and headers from wheels, in the layout of NVIDIA's installer.
install_cuda() {
  # shellcheck disable=SC2016
  as_user 600 python3.13 -m venv /home/somebody/cuda &&
    as_user 600 /home/somebody/cuda/bin/pip install \
      nvidia-cuda-{cccl,crt,nvcc,runtime}==13.0.* nvidia-nvvm==13.0.* &&
    as_user 60 sh -c 'cd ~/cuda/lib/python3.13/site-packages/nvidia/cu13 &&
      ln -s lib lib64 && ln -s libcudart.so.13 lib/libcudart.so &&
      ln -s "$PWD" ~/cuda/home'
}

gpu() {
  make_machine trixie
  check "gpu: CUDA's compiler comes from wheels" install_cuda
  # One architecture: compiling for all takes minutes more.
  check "gpu: set-up compiles Horovod for GPUs, and loads it" \
    as_user 1800 env HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_BUILD_CUDA_CC_LIST=80 \
    HOROVOD_CUDA_HOME=/home/somebody/cuda/home ./scripts/setup.sh
  check "gpu: the same set-up trains, here on CPUs" \
    as_user 300 ./scripts/train.sh "${quick[@]}"
}

# The release files of this clone, as $release, unless they are there.
make_release() {
  [[ -z $release ]] || return 0
  "$root/scripts/release.sh" "$work/release" --dirty "--tensorflow=$line" \
    "${pythons[@]/#/--python=}" || return
  release=$work/release
}

copy_release() {
  cp -R "$release" "$debian/opt/release"
  mkdir "$debian$here"
  if [[ -e ${HVDTRAIN_MNIST_DIR:-}/mnist.npz ]]; then
    mkdir "$debian/opt/mnist"
    cp "$HVDTRAIN_MNIST_DIR/mnist.npz" "$debian/opt/mnist"
    data=(--data_dir=/opt/mnist)
  fi
  chmod -R a+rX "$debian/opt"
  inside chown -R somebody: /home/somebody
}

has_no_compiler() {
  as_user 10 sh -c 'for tool in c++ cc g++ gcc make patch ssh git mpicxx; do
    ! command -v "$tool" || exit; done'
}

# in_environment SECONDS COMMAND...: with the virtual environment $environment active.
in_environment() {
  as_user "$1" env "VIRTUAL_ENV=$environment" "PATH=$environment/bin:/usr/bin:/bin" "${@:2}"
}

# trains_mnist LAUNCHER: until "test accuracy" and the end of the job.
trains_mnist() {
  in_environment 300 "$1" -np 2 python -m hvdtrain.mnist "${data[@]}" &&
    grep -q 'test accuracy 0.9' "$work/output" && grep -q 'shared memory' "$work/output"
}

is_not_broken() {
  in_environment 300 python -m hvdtrain.doctor && ! grep -q '^!!' "$work/output"
}

# Any connection of pip to an index fails.
installs_offline() {
  in_environment 300 env HVDTRAIN_WHEELS=/opt/release HVDTRAIN_CACHE_DIR=/tmp/no_cache \
    PIP_CONFIG_FILE=/dev/null PIP_INDEX_URL=http://127.0.0.1:9/simple PIP_RETRIES=0 \
    python -m hvdtrain.install
}

# prepare_wheels NAME SUITE PYTHON PACKAGE...: a Debian with release files, no compiler.
prepare_wheels() {
  check "$1: the files of a release can be made" make_release
  [[ -n $release ]] || return 1
  here=/home/somebody/empty
  make_debian "$@"
  copy_release
  check "$1: there is no compiler" has_no_compiler
}

# installs_by_pip NAME PYTHON
installs_by_pip() {
  environment=/home/somebody/one
  check "$1: a virtual environment" as_user 60 "$2" -m venv "$environment"
  check "$1: TensorFlow's download" in_environment 600 pip download \
    --only-binary=:all: --dest /tmp/downloads "$tensorflow"
  check "$1: pip install 'hvdtrain[prebuilt]', without that download" \
    in_environment 600 pip install --find-links /opt/release 'hvdtrain[prebuilt]'
  check "$1: horovodrun trains" trains_mnist horovodrun
  check "$1: the doctor finds nothing broken" is_not_broken
}

# installs_by_itself NAME PYTHON
installs_by_itself() {
  environment=/home/somebody/two
  check "$1: another environment" as_user 60 "$2" -m venv "$environment"
  check "$1: TensorFlow is there before" in_environment 600 pip install "$tensorflow"
  check "$1: pip install hvdtrain" \
    in_environment 600 pip install --find-links /opt/release hvdtrain
  check "$1: hvdtrain.install from the same files, without an index" installs_offline
  check "$1: mpirun trains" trains_mnist mpirun
  check "$1: the doctor finds nothing broken there" is_not_broken
}

# wheels NAME SUITE
wheels() {
  prepare_wheels "$1" "$2" python3 python3-venv || return 0
  installs_by_pip "$1" python3
  installs_by_itself "$1" python3
}

# The sources of Debian 13's Python, as $work/python.tar.xz.
download_python() {
  make_base trixie
  # shellcheck disable=SC2016
  inside sh -c 'cd /tmp && sed "s/^deb /deb-src /" /etc/apt/sources.list \
    >/etc/apt/sources.list.d/sources.list && apt-get update &&
    apt-get source --download-only python3.13' &&
    mv "$debian"/tmp/python3.13_*.orig.tar.xz "$work/python.tar.xz"
}

# Debian 11 has Python 3.9: compiles a newer one there, for all Debians of its suite.
compile_python() {
  download_python || return
  make_base bullseye
  cp -a --reflink=auto "$debian" "$work/python" && debian=$work/python &&
    inside apt-get install --yes --no-install-recommends gcc libc6-dev libffi-dev \
      libssl-dev make zlib1g-dev &&
    mkdir "$debian/opt/source" &&
    tar -C "$debian/opt/source" --strip-components=1 -xf "$work/python.tar.xz" &&
    # Little optimization: compiling takes a third of the time.
    inside env -C /opt/source OPT='-O1 -DNDEBUG' ./configure --prefix=/opt/python \
      --disable-test-modules --without-ensurepip &&
    inside make -C /opt/source "--jobs=$(nproc)" install &&
    cp -a "$debian/opt/python" "$work/bullseye.base/opt"
}

wheels_bullseye() {
  local python=/opt/python/bin/python3.13
  check "wheels_bullseye: Python 3.13 is compiled" compile_python
  [[ -d $work/bullseye.base/opt/python ]] || return 0
  prepare_wheels wheels_bullseye bullseye "$python" libffi7 libssl1.1 zlib1g || return 0
  installs_by_pip wheels_bullseye "$python"
}
wheels_bookworm() { wheels wheels_bookworm bookworm; }
wheels_trixie() { wheels wheels_trixie trixie; }

for part in "${parts[@]}"; do
  [[ $part =~ ^(trixie|testing|gpu|wheels_(bullseye|bookworm|trixie))$ ]] ||
    die "unknown part '$part'; there are trixie, testing, gpu, wheels_bullseye," \
      "wheels_bookworm and wheels_trixie"
done
release=${HVDTRAIN_RELEASE:-}
pythons=()
[[ " ${parts[*]} " != *' wheels_bookworm '* ]] || pythons+=(3.11)
[[ ! " ${parts[*]} " =~ ' wheels_'(bullseye|trixie)' ' ]] || pythons+=(3.13)
data=(--dataset=digits)
# The newest TensorFlow: the one of `hvdtrain[prebuilt]`.
line=$(sed -n 's/^    tensorflow-cpu>=\([0-9.]*\),.*/\1/p' "$root/setup.cfg" | tail -n 1)
tensorflow="tensorflow-cpu~=$line.0"
work=$(mktemp -d "${TMPDIR:-/var/tmp}/debian-test.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
check_machine
find_site
copy_downloads
for part in "${parts[@]}"; do "$part"; done
report
