#!/usr/bin/env bash
# Builds the Docker image and tests it: alone, and as two hosts that reach each other by
# ssh.
#
#     scripts/docker_test.sh [--install]
#
# Needs a Docker engine with BuildKit, and Compose for the two hosts. --install, as root
# on Debian: installs the packages below with apt-get where there is no engine, and runs
# one for the time of the test.
#
#     BASE_IMAGE   instead of the public Debian; where that one cannot be pulled either,
#                  debootstrap makes one
#     PIP_CONFIG_FILE, SSL_CERT_FILE   are used for the build, and left out of the image
set -euo pipefail

packages=(ca-certificates debootstrap docker-compose docker.io iptables)
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
image=hvdtrain-test
export DOCKER_BUILDKIT=1
cd "$root"

skip() {
  echo "docker test: skipped: $*"
  exit 0
}

die() {
  echo "docker test: $*" >&2
  exit 1
}

# The first docker on the PATH that can build with secrets: not all of them can.
find_docker() {
  local candidate
  while read -r candidate; do
    if "$candidate" build --help 2>/dev/null | grep -q -- --secret; then
      echo "$candidate"
      return
    fi
  done < <(type -aP docker)
}

find_compose() {
  if "$docker" compose version >/dev/null 2>&1; then
    echo "$docker compose"
  elif command -v docker-compose >/dev/null; then
    echo docker-compose
  fi
}

stop_engine() {
  kill "$engine" 2>/dev/null || true
  for _ in {1..30}; do
    kill -0 "$engine" 2>/dev/null || return 0
    sleep 1
  done
}

start_engine() {
  dockerd --host "unix://$work/docker.sock" --pidfile "$work/dockerd.pid" \
    --exec-root "$work/exec" >"$work/dockerd.log" 2>&1 &
  engine=$!
  export DOCKER_HOST=unix://$work/docker.sock
  for _ in {1..60}; do
    "$docker" info >/dev/null 2>&1 && return
    sleep 1
  done
  tail -n 5 "$work/dockerd.log" >&2
  die "the Docker engine did not come up within a minute"
}

prepare_engine() {
  docker=$(find_docker)
  if [[ -n $docker ]] && "$docker" info >/dev/null 2>&1; then
    return
  fi
  [[ $1 == --install ]] ||
    skip "no Docker engine with BuildKit runs here (or call it with --install)"
  ((EUID == 0)) || die "--install needs root"
  echo "docker test: apt-get install ${packages[*]}"
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
    "${packages[@]}" >/dev/null
  docker=$(find_docker)
  start_engine
}

prepare_base() {
  base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile)}
  if "$docker" image inspect "$base" >/dev/null 2>&1 ||
    timeout 120 "$docker" pull --quiet "$base" >/dev/null 2>&1; then
    return
  fi
  base=hvdtrain-base:bookworm
  "$docker" image inspect "$base" >/dev/null 2>&1 && return
  command -v debootstrap >/dev/null || die "no base image can be pulled: set BASE_IMAGE"
  ((EUID == 0)) || die "no base image can be pulled, and debootstrap needs root"
  echo "docker test: making a base image by debootstrap"
  debootstrap --variant=minbase bookworm "$work/base" >"$work/base.log" 2>&1 ||
    { tail -n 5 "$work/base.log" >&2 && die "debootstrap failed"; }
  tar -C "$work/base" --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' \
    --exclude='./usr/share/locale/*' --exclude='./usr/share/info/*' \
    --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./dev/*' \
    -c . | "$docker" import - "$base" >/dev/null
}

build() {
  local secrets=() certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
  [[ ! -e $certificates ]] || secrets+=(--secret "id=ca_certificates,src=$certificates")
  [[ ! -e ${PIP_CONFIG_FILE:-} ]] || secrets+=(--secret "id=pip_conf,src=$PIP_CONFIG_FILE")
  "$docker" build --network=host --progress=plain "${secrets[@]}" \
    --build-arg "BASE_IMAGE=$base" --tag "$image" --file docker/Dockerfile . \
    >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2 && return 1; }
}

passed=0
failed=0

# check TEXT COMMAND...: one line; the output of a command that failed follows.
check() {
  local text=$1 start=$SECONDS status=0
  shift
  "$@" >"$work/output" 2>&1 || status=$?
  if ((status == 0)); then
    echo "docker test: passed: $text, $((SECONDS - start)) s"
    passed=$((passed + 1))
  else
    echo "docker test: FAILED: $text (exit code $status): $*"
    tail -n 40 "$work/output"
    failed=$((failed + 1))
  fi
}

run() { timeout 900 "$docker" run --rm --network none "$image" "$@"; }

holds_no_build() {
  # shellcheck disable=SC2016
  run sh -c '
    [ "$(id -u)" != 0 ] && ! command -v gcc && ! command -v pip && ! [ -e /build ] &&
    [ -z "$(find /run/secrets /mnt -type f)" ] &&
    [ -z "$(find /opt -name "*.a" -o -name "*.h")" ] &&
    [ -z "$(find / -xdev -name "ssh_host*key*" 2>/dev/null)" ]'
}

stops_at_once() {
  local name=hvdtrain-test-stop start
  "$docker" run --detach --rm --network none --name "$name" "$image" \
    --dataset=digits --max_steps=100000000 >/dev/null
  for _ in {1..300}; do
    ! "$docker" logs "$name" 2>&1 | grep -q step || break
    sleep 1
  done
  "$docker" logs "$name" 2>&1 | grep step | tail -n 1
  start=$SECONDS
  "$docker" stop --time 30 "$name" >/dev/null
  echo "stopped within $((SECONDS - start)) s"
  ((SECONDS - start < 25))
}

compose() { $compose -p hvdtrain-test -f docker/compose.yaml "$@"; }
# On host1, in its own session of commands.
across() { timeout 900 $compose -p hvdtrain-test -f docker/compose.yaml exec -T host1 "$@"; }
loss() { sed -n 's/.*test_loss": \([0-9.e-]*\).*/\1/p'; }

program=(python -m hvdtrain.mnist --dataset=digits --max_steps=400)
hosts=(-np 2 -H "host1:1,host2:1")

trains_across() {
  local one two
  across "$@" "${program[@]}" --model_dir=/tmp/two || return
  across horovodrun -np 2 "${program[@]}" --model_dir=/tmp/one || return
  one=$(across cat /tmp/one/summary.json | loss)
  two=$(across cat /tmp/two/summary.json | loss)
  across cat /tmp/two/summary.json
  echo "test loss of one host $one, of two $two"
  [[ -n $one && $one == "$two" ]] && across grep -q host2 /tmp/two/summary.json
}

# A host that is lost ends the job, within a minute and with a word on it.
survives_no_host() {
  local log=$work/lost status=0 lost
  : >"$log"
  compose up -d >/dev/null 2>&1
  across "$@" python -m hvdtrain.mnist --dataset=digits --max_steps=100000000 \
    >"$log" 2>&1 &
  lost=$!
  for _ in {1..300}; do
    ! grep -q step "$log" || break
    sleep 1
  done
  compose kill host2 >/dev/null 2>&1
  wait "$lost" || status=$?
  tail -n 12 "$log"
  ((status)) && grep -q host2 "$log"
}

two_hosts() {
  export IMAGE=$image
  compose down -v >/dev/null 2>&1 || true
  compose up -d >"$work/up.log" 2>&1 || { tail "$work/up.log" && return 1; }
  check "two hosts train by horovodrun with MPI" trains_across horovodrun --mpi "${hosts[@]}"
  check "two hosts train by horovodrun with Gloo" \
    trains_across horovodrun --gloo "${hosts[@]}"
  check "two hosts train by mpirun" trains_across mpirun "${hosts[@]}"
  check "a lost host ends a job of mpirun" survives_no_host mpirun "${hosts[@]}"
  check "a lost host ends a job of Gloo" survives_no_host horovodrun --gloo "${hosts[@]}"
}

clean() {
  [[ -z ${compose:-} ]] || compose down -v -t 1 >/dev/null 2>&1 || true
  "$docker" rm -f hvdtrain-test-stop >/dev/null 2>&1 || true
  [[ -z $engine ]] || stop_engine
  rm -rf "$work"
}

engine=''
work=$(mktemp -d "${TMPDIR:-/tmp}/docker-test.XXXXXX")
docker=docker
trap clean EXIT
prepare_engine "${1:-}"
compose=$(find_compose)
start=$SECONDS
prepare_base
build || die "the image cannot be built"
size=$("$docker" image inspect --format '{{.Size}}' "$image")
echo "docker test: built in $((SECONDS - start)) s, $((size / 1000000)) MB"
check "the image holds no compiler, secret or key" holds_no_build
check "the image tests itself without a network" run test
check "docker run trains" run --dataset=digits --max_steps=400
check "a flag that is wrong ends with 2" bash -c "
  '$docker' run --rm --network none $image --epochs=none; [[ \$? == 2 ]]"
check "docker stop ends all ranks" stops_at_once
if [[ -n $compose ]]; then
  two_hosts
else
  echo "docker test: skipped: two hosts, there is no docker compose"
fi
echo "$passed passed, $failed failed"
((failed == 0))
