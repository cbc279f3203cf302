"""Native reductions between hosts, with a fault of rank 1: see test_host_faults.py.

scripts/hosts.sh horovodrun --gloo -np 2 -H host1:1,host2:1 --network-interface eth0 \
  python tests/commands/reducing_program.py kill
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives import transport

STEPS, FAULT_STEP = 24, 12
# Run on the host of rank 1.
COMMANDS = {
    "cut": "ip link set eth0 down",
    # The kernel sends anew 13 and 25 s after the beginning.
    "down": "ip link set eth0 down; (sleep 14; ip link set eth0 up) &",
    "slow": "tc qdisc add dev eth0 root tbf rate 20mbit burst 32kb latency 400ms",
}


def fail(fault):
    # The time, for the test.
    print(f"fault at {time.time():.2f}", flush=True)
    if fault in COMMANDS:
        subprocess.run(COMMANDS[fault], shell=True, check=True)
    elif fault == "late":
        time.sleep(6)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def main(fault):
    hvd.init()
    total = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum))
    ranks = np.arange(hvd.size())
    for step in range(STEPS):
        if step == FAULT_STEP and hvd.rank() == 1:
            fail(fault)
        # In two messages to each host, with the call, and in a ring.
        for elements in (200_000, 100, 1_500_000 if step == FAULT_STEP else 1):
            result = total(tf.fill([elements], float(step + hvd.rank())))
            assert np.all(result == np.sum(ranks + step))
    path = transport.reduction_path()
    print(f"rank {hvd.rank()} is done over {path} at {time.time():.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
