#!/usr/bin/env bash
# Builds the Docker image and tests it: alone, and as two hosts that reach each other by
# ssh.
#
#     scripts/docker_test.sh [--install]
#
# Needs a Docker engine with BuildKit, and Compose for the two hosts. --install, as root
# on Debian: if no engine runs, installs the packages below with apt-get and starts an
# engine, which is stopped and deleted with its data at the end of the test.
#
# The image takes Horovod and the native operations that .venv was made with, if its
# Python is the image's, and else compiles them.
#
#     HVDTRAIN_ENVIRONMENT   directory of another environment than .venv
#     BASE_IMAGE   instead of the public Debian; if it cannot be pulled, debootstrap
#                  makes one
#     PIP_CONFIG_FILE, SSL_CERT_FILE   are used for the build, and not stored in the image
set -euo pipefail

title='docker test'
packages=(debootstrap docker-compose docker.io)
install=${1:-}
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/testing.sh
source scripts/testing.sh

# The first docker on the PATH that can build with secrets.
find_docker() {
  local candidate
  docker=''
  while read -r candidate; do
    if [[ $("$candidate" build --help 2>/dev/null) == *--secret* ]]; then
      docker=$candidate
      return
    fi
  done < <(type -aP docker)
}

find_compose() {
  compose=("$docker" compose)
  "${compose[@]}" version >/dev/null 2>&1 || compose=(docker-compose)
  "${compose[@]}" version >/dev/null 2>&1 || skip "there is no Docker Compose"
  compose+=(-p "$name" -f docker/compose.yaml)
}

# start_engine [COMMAND...]: COMMAND runs dockerd. setsid: a Ctrl-C must not end the
# engine before clean has removed its containers. No bridge and no iptables: the network
# of the machine stays as it is.
start_engine() {
  export DOCKER_HOST=unix://$work/engine/socket
  mkdir -p "$work/engine"
  setsid "$@" dockerd --host "$DOCKER_HOST" --data-root "$work/engine/data" \
    --exec-root "$work/engine/exec" --pidfile "$work/engine/pid" --bridge none \
    --iptables=false --ip-forward=false >>"$work/engine.log" 2>&1 &
  engine=$!
  wait_for 60 "$docker" info && return
  tail -n 5 "$work/engine.log" >&2
  die "the Docker engine did not come up within a minute"
}

stop_engine() {
  kill "$engine"
  wait_for 60 eval "! kill -0 $engine"
}

prepare_engine() {
  find_docker
  if [[ -n $docker ]] && "$docker" info >/dev/null 2>&1; then
    return
  fi
  [[ -n $install ]] || skip "no Docker engine with BuildKit runs here; see --install"
  ((EUID == 0)) || die "--install needs root"
  install_packages
  find_docker
  start_engine
}

prepare_base() {
  base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile)}
  if "$docker" image inspect "$base" >/dev/null 2>&1 ||
    timeout 120 "$docker" pull --quiet "$base" >/dev/null 2>&1; then
    return
  fi
  base=hvdtrain-base:bookworm
  if "$docker" image inspect "$base" >/dev/null 2>&1; then return; fi
  { command -v debootstrap >/dev/null && ((EUID == 0)); } ||
    die "no base image can be pulled: set BASE_IMAGE, or be root and call --install"
  echo "$title: no base image can be pulled, debootstrap makes one"
  timeout 600 debootstrap --variant=minbase bookworm "$work/base" \
    >"$work/base.log" 2>&1 ||
    { tail -n 5 "$work/base.log" >&2 && die "debootstrap failed"; }
  tar -C "$work/base" --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' \
    --exclude='./usr/share/locale/*' --exclude='./usr/share/info/*' \
    --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
    --exclude='./dev/*' -c . | "$docker" import - "$base" >/dev/null
}

# The image $wheels, which is empty if this machine has no wheels for the image.
prepare_wheels() {
  local python=${HVDTRAIN_ENVIRONMENT:-.venv}/bin/python
  mkdir "$work/wheels"
  # Wheels for the MPI of this machine would not fit.
  if [[ -e $python ]] && ! type -P mpicxx >/dev/null; then
    "$python" -m hvdtrain.install --wheels="$work/wheels" >"$work/wheels.log" 2>&1 ||
      tail -n 5 "$work/wheels.log" >&2
  fi
  compgen -G "$work/wheels/horovod-*-cp311-*.whl" >/dev/null || return 0
  wheels=$name-wheels
  tar -C "$work/wheels" -c . | "$docker" import - "$wheels" >/dev/null
  echo "$title: the image takes Horovod from $python"
}

build() {
  local secrets=() certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
  [[ ! -e $certificates ]] || secrets+=(--secret "id=ca_certificates,src=$certificates")
  [[ ! -e ${PIP_CONFIG_FILE:-} ]] ||
    secrets+=(--secret "id=pip_conf,src=$PIP_CONFIG_FILE")
  timeout 1200 "$docker" build --network=host --progress=plain "${secrets[@]}" \
    --build-arg "BASE_IMAGE=$base" --build-arg "WHEELS=$wheels" \
    --tag "$name" --file docker/Dockerfile . \
    >"$work/build.log" 2>&1 ||
    { tail -n 40 "$work/build.log" >&2 && die "the image cannot be built"; }
}

# The most restricted container: no network, no capabilities, no ptrace, 64 MB of shared
# memory.
run() {
  timeout 600 "$docker" run --rm --label "$name" --network none --cap-drop ALL \
    --security-opt no-new-privileges --security-opt "seccomp=$work/no_ptrace.json" \
    --shm-size 64m "$name" "$@"
}

holds_no_build() {
  # shellcheck disable=SC2016
  run sh -c '
    [ "$(id -u)" != 0 ] && ! command -v gcc && ! command -v pip && ! [ -e /build ] &&
    [ -z "$(find /run/secrets /mnt -type f)" ] &&
    [ -z "$(find /opt -name "*.a" -o -name "*.h")" ] &&
    [ -z "$(find / -xdev -name "ssh_host*key*" 2>/dev/null)" ]'
}

trains_by_default() {
  run | tee "$work/default"
  grep -q 'ranks  *2 on' "$work/default" &&
    grep -q 'test accuracy 0.9' "$work/default"
}

refuses_a_flag() {
  local status=0
  run --epochs=none || status=$?
  ((status == 2))
}

is_training() { grep -q 'step [0-9]' <("$docker" logs "$1" 2>&1); }

stops_after_saving() {
  local start
  "$docker" run --detach --label "$name" --network none --name "$name" "$name" \
    "${endless[@]}" --model_dir=/tmp/run
  wait_for 120 is_training "$name" || return
  start=$SECONDS
  "$docker" stop --time 30 "$name"
  echo "stopped after $((SECONDS - start)) s"
  "$docker" logs "$name" 2>&1 | tee "$work/stopped"
  ((SECONDS - start < 25)) && grep -q 'Stopped at step' "$work/stopped" &&
    [[ $("$docker" inspect --format '{{.State.ExitCode}}' "$name") == 75 ]]
}

# across COMMAND...: on host1.
across() { timeout 300 "${compose[@]}" exec -T host1 "$@"; }

# trains NAME COMMAND...: its summary is kept in $work/NAME.
trains() {
  across "${@:2}" python -m hvdtrain.mnist "${quick[@]}" "--model_dir=/tmp/$1" &&
    across cat "/tmp/$1/summary.json" >"$work/$1"
}

# Two hosts must give the loss of one host, to the last digit. With one core for each
# rank, as on one host: the number of threads changes the order of sums.
trains_across() {
  local rank='${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}'
  trains "$@" sh -c "exec taskset --cpu-list $rank "'"$@"' sh && grep host2 "$work/$1" &&
    diff <(grep '"test_loss"' "$work/one") <(grep '"test_loss"' "$work/$1")
}

kill_host2() { "${compose[@]}" kill host2; }

# As after a power failure: no connection is closed.
cut_host2_off() {
  "$docker" network disconnect --force \
    "$("$docker" network ls -q --filter "label=com.docker.compose.project=$name")" \
    "$("${compose[@]}" ps -q host2)"
}

no_rank_is_left() { ! "${compose[@]}" top host1 | grep hvdtrain.mnist; }

# ends_when LOSE COMMAND...: the job ends on the other host too, with host2's name.
ends_when() {
  local lose=$1 status=0 log=$work/lost job
  shift
  : >"$log"
  "${compose[@]}" up -d --no-deps --force-recreate host2
  across "$@" python -m hvdtrain.mnist "${endless[@]}" >"$log" 2>&1 &
  job=$!
  wait_for 120 grep -q 'step [0-9]' "$log" || return
  "$lose"
  wait "$job" || status=$?
  tail -n 25 "$log"
  ((status && status != 124)) && grep -q host2 <(sed '1,/step [0-9]/d' "$log") &&
    wait_for 30 no_rank_is_left
}

two_hosts() {
  local hosts=(-np 2 -H "host1:1,host2:1")
  # In a network namespace: a firewall of the machine would block the hosts' network. The
  # build before needed the network of the machine.
  if [[ -n $engine ]]; then
    stop_engine
    start_engine unshare --net
  fi
  check "two hosts start" "${compose[@]}" up -d
  check "one host of the cluster trains" trains one horovodrun -np 2
  check "two hosts equal it by horovodrun with MPI" \
    trains_across mpi horovodrun --mpi "${hosts[@]}"
  check "by horovodrun with Gloo" trains_across gloo horovodrun --gloo "${hosts[@]}"
  check "by mpirun" trains_across mpirun mpirun "${hosts[@]}"
  check "a killed host ends a job of mpirun" ends_when kill_host2 mpirun "${hosts[@]}"
  check "a silent host, too" ends_when cut_host2_off mpirun "${hosts[@]}"
  check "a killed host ends a job of Gloo" \
    ends_when kill_host2 horovodrun --gloo "${hosts[@]}"
  check "a silent host, too" ends_when cut_host2_off horovodrun --gloo "${hosts[@]}"
}

# Runs at every exit, also of an incomplete start.
clean() {
  set +e
  if [[ -n ${compose:-} ]]; then "${compose[@]}" down -v -t 1; fi
  if [[ -n ${docker:-} ]]; then
    "$docker" ps -aq --filter "label=$name" | xargs -r "$docker" rm -f
    "$docker" rmi "$name" "$name-wheels"
  fi
  if [[ -n $engine ]]; then stop_engine; fi
  rm -rf --one-file-system "$work"
} >/dev/null 2>&1

engine=''
work=$(mktemp -d "${TMPDIR:-/tmp}/hvdtrain-test.XXXXXX")
name=$(basename "$work" | tr '[:upper:].' '[:lower:]-')
export IMAGE=$name DOCKER_BUILDKIT=1
quick=(--dataset=digits --max_steps=400)
endless=(--dataset=digits --max_steps=100000000)
echo '{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"action": "SCMP_ACT_ERRNO",
  "names": ["ptrace", "process_vm_readv", "process_vm_writev"]}]}' \
  >"$work/no_ptrace.json"
trap clean EXIT
prepare_engine
find_compose
prepare_base
wheels=scratch
prepare_wheels
build
size=$("$docker" image inspect --format '{{.Size}}' "$name")
tensorflow=$(run sh -c 'du -sk /opt/hvdtrain/lib/python3*/site-packages/tensorflow')
echo "$title: built in $SECONDS s, $((size / 1000000)) MB, of which TensorFlow" \
  "$((${tensorflow%%[[:space:]]*} * 1024 / 1000000)) MB"
check "the image holds no compiler, secret or key" holds_no_build
check "docker run IMAGE trains two ranks" trains_by_default
check "docker run IMAGE test" run test
check "a flag that is wrong ends with 2" refuses_a_flag
check "docker stop ends all ranks, after a checkpoint" stops_after_saving
two_hosts
report
