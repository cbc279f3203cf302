#!/usr/bin/env bash
# Runs a command on several hosts, host1, host2, ...: network namespaces of this machine
# that a bridge joins.
#
#     scripts/hosts.sh [--hosts=2] [--delay=TIME] [--rate=RATE] COMMAND...
#     scripts/hosts.sh --delay=100us horovodrun -np 2 -H host1:1,host2:1 \
#       --network-interface=eth0 python -m hvdtrain.benchmark
#
# COMMAND runs on host1; `ssh host2` starts a program on host2. Each host has its share
# of the cores, at least one, and all of the files. --delay holds each packet that a host
# sends for this time, by the kernel's netem; --rate=1gbit limits what each host sends, by
# tbf, which drops packets that would wait for more than 50 ms. With both, netem replaces
# tbf's queue, and holds up to 100,000 packets without a drop. Needs root and iproute2.
set -euo pipefail

network=10.98.0

die() {
  echo "hosts: $*" >&2
  exit 1
}

# shape HOST DELAY RATE: holds and limits what a host sends.
shape() {
  local host=$1 delay=$2 rate=$3 parent=(root)
  if [[ -n $rate ]]; then
    # The burst has room for the largest packet, before the kernel segments it.
    tc -n "$host" qdisc add dev eth0 root handle 1: tbf rate "$rate" burst 128kb \
      latency 50ms ||
      die "this kernel has no tbf for --rate=$rate, or it is not a rate such as 1gbit"
    parent=(parent 1:1)
  fi
  [[ -z $delay ]] ||
    tc -n "$host" qdisc add dev eth0 "${parent[@]}" netem delay "$delay" limit 100000 ||
    die "this kernel has no netem for --delay=$delay, or it is not a time such as 100us"
}

# join WORK DELAY RATE: makes the hosts.
join() {
  local work=$1 delay=$2 rate=$3 host
  # Only in this mount namespace.
  mount -t tmpfs tmpfs /run
  mkdir /run/netns
  echo '127.0.0.1 localhost' >"$work/hosts"
  mount --bind "$work/hosts" /etc/hosts
  ip link add hosts type bridge
  ip link set hosts up
  for ((host = 1; host <= HOSTS_NUMBER; host++)); do
    echo "$network.$host host$host" >>"$work/hosts"
    ip netns add "host$host"
    ip link add "port$host" type veth peer name eth0 netns "host$host"
    ip link set "port$host" master hosts up
    ip -n "host$host" address add "$network.$host/24" dev eth0
    ip -n "host$host" link set eth0 up
    ip -n "host$host" link set lo up
    shape "host$host" "$delay" "$rate"
  done
}

# enter NUMBER COMMAND...: replaces this process by the command on a host.
enter() {
  local number=$1 cores share
  cores=$(nproc --all)
  share=$((cores / HOSTS_NUMBER))
  ((share)) || share=1
  shift
  local first=$(((number - 1) * share % cores))
  exec taskset --cpu-list "$first-$((first + share - 1))" \
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
  [[ $host =~ ^host[1-9][0-9]*$ ]] && ((${host#host} <= HOSTS_NUMBER)) ||
    die "received the host '$host'; expected host1 to host$HOSTS_NUMBER"
  enter "${host#host}" sh -c "$*"
}

self=$(readlink -f "${BASH_SOURCE[0]}")
if [[ ${0##*/} == ssh ]]; then
  : "${HOSTS_NUMBER:=2}"
  connect "$@"
fi
if [[ ${1:-} == --inside ]]; then
  work=$2 delay=$3 rate=$4
  shift 4
  join "$work" "$delay" "$rate"
  mkdir "$work/bin"
  ln -s "$self" "$work/bin/ssh"
  export PATH=$work/bin:$PATH OMPI_MCA_plm_rsh_agent=$work/bin/ssh
  export OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_oob_tcp_if_include=eth0
  enter 1 "$@"
fi
delay='' rate='' number=2
while [[ ${1:-} == --* ]]; do
  case $1 in
    --delay=?*) delay=${1#--delay=} ;;
    --rate=?*) rate=${1#--rate=} ;;
    --hosts=*) number=${1#--hosts=} ;;
    *) die "received the option $1; expected --hosts=N, --delay=TIME or --rate=RATE" ;;
  esac
  shift
done
[[ $# -gt 0 ]] ||
  die "usage: scripts/hosts.sh [--hosts=2] [--delay=TIME] [--rate=RATE] COMMAND..."
[[ $number =~ ^[1-9][0-9]{0,2}$ ]] && ((number <= 254)) ||
  die "received --hosts=$number; expected a number from 1 to 254"
# For `ssh` of the command.
export HOSTS_NUMBER=$number
((EUID == 0)) || die "it needs root, to make network namespaces"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# All processes end with process 1 of the inner namespace, and that one with unshare.
unshare --net --mount --uts --pid --fork --kill-child --mount-proc \
  "$self" --inside "$work" "$delay" "$rate" "$@"
