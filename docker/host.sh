#!/bin/sh
# A container as a host of a cluster: mpirun and horovodrun start ranks in it by ssh.
#
#     host.sh keys       makes the cluster's key in ~/.ssh, a volume that the hosts share
#     host.sh [KEY]      runs sshd on port 2222; its host key is ~/.ssh/KEY (cluster)
set -eu
port=2222
cd "$HOME/.ssh"

make_keys() {
  if [ -e config ]; then return; fi
  chmod 700 .
  ssh-keygen -q -t ed25519 -N '' -C cluster -f cluster
  cp cluster.pub authorized_keys
  echo "* $(cat cluster.pub)" >known_hosts
  # A host that loses power does not close its connections: without keep-alive probes a
  # job would wait for it.
  cat >config <<-CONFIG
	Port $port
	IdentityFile ~/.ssh/cluster
	BatchMode yes
	ConnectTimeout 10
	ServerAliveInterval 5
	ServerAliveCountMax 3
	CONFIG
}

# Processes of ranks in this container.
ranks() {
  grep -lsz '^\(HOROVOD\|OMPI_COMM_WORLD\)_RANK=' /proc/[0-9]*/environ | cut -d / -f 3
}

# The container ends with this script: after the ranks, which write a checkpoint first.
stop() {
  for rank in $(ranks); do
    kill -USR1 "$rank" || true
  done
  while [ -n "$(ranks)" ]; do
    sleep 1
  done
  exit 0
}

if [ "${1-}" = keys ]; then
  make_keys
else
  # StrictModes=no: sshd would refuse keys in a volume whose modes the engine sets.
  /usr/sbin/sshd -D -e -f /dev/null -p "$port" -h "$PWD/${1:-cluster}" \
    -o PidFile=none -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
    -o StrictModes=no -o "SetEnv=PATH=$PATH" &
  trap stop TERM USR1
  wait
fi
