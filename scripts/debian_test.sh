#!/usr/bin/env bash
# Runs the README's first commands in bare Debians, as a user without root.
#
#     scripts/debian_test.sh [--install] [trixie] [testing] [gpu]      (all three)
#
# A bare Debian has what debootstrap installs, a C++ compiler, patch and Python 3.13.
# trixie is Debian 13; testing has the newest compiler and C library; gpu, in Debian 13,
# compiles Horovod for NVIDIA GPUs and loads it, on a machine that may have none. All is
# downloaded and built, without the caches of this machine. Needs root and debootstrap;
# --install installs debootstrap with apt-get.
#
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
((${#parts[@]})) || parts=(trixie testing gpu)
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
# shellcheck source=scripts/testing.sh
source "$root/scripts/testing.sh"
asked_for=(g++ patch python3.13-venv)
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
      mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm" && chroot "$@"
    exit' \
    sh "$debian" env -i LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    DEBIAN_FRONTEND=noninteractive "${site[@]}" "$@"
}

# as_user SECONDS COMMAND...: in the clone.
as_user() {
  inside timeout -k 30 "$1" setpriv --reuid=somebody --regid=somebody --clear-groups \
    env -C "$clone" HOME=/home/somebody "${@:2}"
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

# Chains of &&: `set -e` has no effect in a function whose exit code the caller tests.
install_debian() {
  # A mirror may serve package lists that have expired.
  debootstrap --variant=minbase "$1" "$debian" &&
    cp -rL /etc/resolv.conf "$work/site" "$debian/etc" &&
    echo 'Acquire::Check-Valid-Until "false";' >"$debian/etc/apt/apt.conf.d/90mirror" &&
    inside apt-get update &&
    inside apt-get install --yes --no-install-recommends "${asked_for[@]}" &&
    inside useradd --create-home somebody
}

copy_clone() {
  mkdir "$debian$clone"
  tar -C "$root" --exclude='./.git' --exclude='./.venv*' -c . | tar -C "$debian$clone" -x
  inside chown -R somebody: /home/somebody
}

# make_machine SUITE: a Debian with a clone in it, unless it exists.
make_machine() {
  debian=$work/$1
  [[ ! -d $debian ]] || return 0
  install_debian "$1" >"$work/$1.log" 2>&1 ||
    { tail -n 5 "$work/$1.log" >&2 && die "debootstrap or apt-get failed for $1"; }
  copy_clone
  # shellcheck disable=SC2016
  inside sh -c '. /etc/os-release && echo "'"$title"': $PRETTY_NAME;" \
    "$(python3.13 --version); $(g++ --version | head -n 1)"'
}

names_a_patch_that_does_not_apply() {
  local patches=$debian$clone/hvdtrain/installer/patches status=0
  cp "$patches"/01-*.patch "$patches/00-twice.patch"
  as_user 300 scripts/build_horovod.sh .venv/bin/python /tmp/wheels |& tee "$work/said" ||
    status=$?
  rm "$patches/00-twice.patch"
  ((status == 1)) && grep -q 'error: 01-.*.patch does not apply' "$work/said"
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

trixie() {
  make_machine trixie
  trains trixie
  check "trixie: two ranks compute what one process computes" \
    as_user 1200 ./scripts/test.sh oracle
  check "trixie: a patch that does not apply ends the build" \
    names_a_patch_that_does_not_apply
  check "trixie: set-up shows the compiler's error" shows_the_error_of_the_compiler
}

testing() {
  make_machine testing
  trains testing
  check "testing: the collectives give the right numbers" as_user 600 sh -c \
    'PATH=$PWD/.venv/bin:$PATH horovodrun -np 2 python -m pytest -q -p no:cacheprovider \
      tests/parallel/test_collectives.py'
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

for part in "${parts[@]}"; do
  [[ $part =~ ^(trixie|testing|gpu)$ ]] ||
    die "unknown part '$part'; there are trixie, testing and gpu"
done
work=$(mktemp -d "${TMPDIR:-/var/tmp}/debian-test.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
check_machine
find_site
for part in "${parts[@]}"; do "$part"; done
report
