#!/usr/bin/env bash
# Runs a command on two hosts, host1 and host2: network namespaces of this machine that
# a pair of virtual interfaces joins.
#
#     scripts/hosts.sh [--delay=TIME] COMMAND...
#     scripts/hosts.sh --delay=100us horovodrun -np 2 -H host1:1,host2:1 \
#       --network-interface=eth0 python -m hvdtrain.benchmark
#
# COMMAND runs on host1; `ssh host2` starts a program on host2. Each host has one half of
# the cores, and all of the files. --delay holds each packet for this time, in both
# directions, by the kernel's netem. Needs root and iproute2.
set -euo pipefail

network=10.98.0

die() {
  echo "hosts: $*" >&2
  exit 1
}

# join WORK DELAY
join() {
  local work=$1 delay=$2 host
  # Only in this mount namespace.
  mount -t tmpfs tmpfs /run
  mkdir /run/netns
  printf '%s\n' '127.0.0.1 localhost' "$network.1 host1" "$network.2 host2" >"$work/hosts"
  mount --bind "$work/hosts" /etc/hosts
  ip netns add host1
  ip netns add host2
  ip link add eth0 netns host1 type veth peer name eth0 netns host2
  for host in 1 2; do
    ip -n "host$host" address add "$network.$host/24" dev eth0
    ip -n "host$host" link set eth0 up
    ip -n "host$host" link set lo up
    [[ -z $delay ]] ||
      tc -n "host$host" qdisc add dev eth0 root netem delay "$delay" limit 100000 ||
      die "this kernel has no netem for --delay=$delay, or it is not a time such as 100us"
  done
}

# enter NUMBER COMMAND...: replaces this process by the command on a host.
enter() {
  local number=$1 half=$(($(nproc) / 2))
  shift
  ((half)) || half=1
  exec taskset --cpu-list "$(((number - 1) * half))-$((number * half - 1))" \
    nsenter "--net=/run/netns/host$number" unshare --uts \
    sh -c "hostname host$number"' && exec "$@"' sh "$@"
}

# ssh, for horovodrun and mpirun: without its options, which may follow the host.
connect() {
  local host=''
  while [[ $# -gt 0 && ($1 == -* || -z $host) ]]; do
    case $1 in
      -[io]* | -p*) [[ ${#1} -gt 2 ]] || shift ;;
      -*) ;;
      *) host=$1 ;;
    esac
    shift
  done
  [[ $host =~ ^host[12]$ ]] || die "received the host '$host'; expected host1 or host2"
  enter "${host#host}" sh -c "$*"
}

self=$(readlink -f "${BASH_SOURCE[0]}")
case ${0##*/} in
  ssh) connect "$@" ;;
esac
if [[ ${1:-} == --inside ]]; then
  work=$2 delay=$3
  shift 3
  join "$work" "$delay"
  mkdir "$work/bin"
  ln -s "$self" "$work/bin/ssh"
  export PATH=$work/bin:$PATH OMPI_MCA_plm_rsh_agent=$work/bin/ssh
  export OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_oob_tcp_if_include=eth0
  enter 1 "$@"
fi
delay=''
if [[ ${1:-} == --delay=* ]]; then
  delay=${1#--delay=}
  shift
fi
[[ $# -gt 0 ]] || die "usage: scripts/hosts.sh [--delay=TIME] COMMAND..."
((EUID == 0)) || die "it needs root, to make network namespaces"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# All processes end with process 1 of the inner namespace, and that one with unshare.
unshare --net --mount --uts --pid --fork --kill-child --mount-proc \
  "$self" --inside "$work" "$delay" "$@"
