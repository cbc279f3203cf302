"""Trains until rank 1 has the fault FAULT [PHASE [CONTROL_GROUP]] of the command line.

A script of a user: it calls `hvd.init`, and nothing else of the package knows of it.
PHASE is "init", before `hvd.init`; "first", before the first collective; "step", the
default, in the training; or "end", after it.
"""

import ctypes
import os
import pathlib
import re
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd

FOR_EVER = 3600
FAULT_STEP = 3


def tell():
    print(f"fault of rank 1 at {time.time():.2f}", flush=True)


def wait_in_input():
    tell()
    time.sleep(FOR_EVER)  # input


def wait_in_python_function(x):
    if is_at_fault():
        tell()
        time.sleep(FOR_EVER)  # py_function
    return x


def is_at_fault():
    return hvd.rank() == 1 and count.steps >= FAULT_STEP


class Count(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if phase == "step" and is_at_fault():
            act()


def wait_in_callback():
    time.sleep(FOR_EVER)  # callback


def hold_gil():
    reader, _ = os.pipe()
    # A PyDLL keeps Python's lock during the call.
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)  # gil


def match_for_ever():
    re.match(r"(a|aa)+$", "a" * 64 + "b")  # regex


def wait_for_lock():
    lock = threading.Lock()
    with lock:
        lock.acquire()  # lock


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def die_in_native_code():
    ctypes.string_at(0)  # segfault


def use_memory():
    # Rank 1 alone is in the group, whose limit it then exceeds.
    pathlib.Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))
    blocks = []
    while True:
        blocks.append(np.ones(1 << 22))  # memory


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error():
    raise KeyError("on purpose")


def raise_with_thread():
    threading.Thread(target=time.sleep, args=[FOR_EVER], name="upload").start()
    raise_error()


def exit_with_thread():
    threading.Thread(target=time.sleep, args=[FOR_EVER], name="upload").start()
    sys.exit(3)


def kill_with_child():
    # It keeps the output and the connections of the rank open.
    if os.fork():
        kill()
    time.sleep(FOR_EVER)


def replace_program():
    os.execv("/bin/sleep", ["sleep", str(FOR_EVER)])


def stop_training():
    count.model.stop_training = True


FAULTS = {
    "callback": wait_in_callback,
    "kill": kill,
    "raise": raise_error,
    "thread": raise_with_thread,
    "exit_thread": exit_with_thread,
    "child": kill_with_child,
    "exit": lambda: os._exit(3),
    "return": lambda: sys.exit(0),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exec": replace_program,
    "left": stop_training,
    "gil": hold_gil,
    "regex": match_for_ever,
    "lock": wait_for_lock,
    "stop": stop,
    "segfault": die_in_native_code,
    "memory": use_memory,
}


def act():
    if do := FAULTS.get(fault):
        tell()
        do()


def batches():
    step = 0
    while True:
        step += 1
        if fault == "input" and hvd.rank() == 1 and step > FAULT_STEP:
            wait_in_input()
        yield np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def train():
    dataset = tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec([8, 4], tf.float32),
            tf.TensorSpec([8, 1], tf.float32),
        ),
    )
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    layers = [keras.layers.Dense(1)]
    if fault == "py_function":
        layers.insert(0, keras.layers.Lambda(call_python, output_shape=(4,)))
    model = keras.Sequential([keras.Input([4]), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    model.fit(dataset, steps_per_epoch=50, verbose=0, callbacks=[start, count])  # fit


def call_python(x):
    y = tf.py_function(wait_in_python_function, [x], tf.float32)
    return tf.ensure_shape(y, [None, 4])


def named(name):
    """Return a compiled allreduce, which Horovod matches across ranks by its name."""
    return tf.function(lambda: hvd.allreduce(tf.ones([1]), name=name))


def reduce_in_two_orders():
    first, second = named("first"), named("second")
    tell()
    if hvd.rank() == 0:
        first()  # order of rank 0
        second()
    else:
        second()  # order of rank 1
        first()


def skip():
    first, second, third = named("first"), named("second"), named("third")
    first()
    tell()
    if hvd.rank() == 0:
        second()  # skipped by rank 1
    third()  # after the skip


if __name__ == "__main__":
    fault, phase = [*sys.argv[1:3], "step"][:2]
    print(f"this is process {os.getpid()}", flush=True)
    # Before `hvd.init`, as launchers give it.
    ranks = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
    is_here = next(os.environ[name] for name in ranks if name in os.environ) == "1"
    if phase == "init" and is_here:
        act()
    hvd.init()
    if phase == "first" and is_here:
        act()
    count = Count()
    {"order": reduce_in_two_orders, "skip": skip}.get(fault, train)()
    if fault == "left" and is_here:
        time.sleep(FOR_EVER)  # after the fit
    if phase == "end" and is_here:
        act()
    print("no hang")
