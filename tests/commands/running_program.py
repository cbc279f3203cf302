"""Calls `hvdtrain.run`: python running_program.py ENGINE CASE FOLDER [OPTIONS].

OPTIONS are those of the engine, as JSON. ENGINE "horovodrun" is for ranks that this
launcher has started: they train as in the case "digits".
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import psutil

import hvdtrain
from hvdtrain.job import cores, launchers

RANKS = 2
RUNS = 20


def victims(name, rank):
    """Return the processes that this rank kills: itself, or those that started it."""
    own = psutil.Process()
    # The nearest of a name: the executor, and not the driver that has started it.
    parents = {each.name(): each for each in reversed(own.parents())}
    if name == "node":
        node = parents["raylet"]
        # Ray's worker would survive the kill of its parent until that is reaped.
        return [] if "--head" in node.cmdline() else [node, own.parent()]
    processes = {"rank": own, "agent": own.parent(), "executor": parents.get("java")}
    return [processes[name]] if rank == 1 else []


def check_earlier_rank(file):
    """Fail if a rank of the job before this one still runs; note this one."""
    if file.exists():
        with contextlib.suppress(psutil.NoSuchProcess):
            # Its parent may have been killed, and nobody reaps it.
            status = psutil.Process(int(file.read_text())).status()
            assert status == psutil.STATUS_ZOMBIE, f"{file.name} is {status}"
    file.write_text(str(os.getpid()))


def train(folder, epochs=2, at_step=None, killed="rank"):
    """Train on the digits of the package; write what rank 0 has."""
    from hvdtrain import data, job

    world = job.start(seed=1)
    check_earlier_rank(pathlib.Path(folder, f"pid-{world.rank}"))
    import keras
    import numpy as np

    from hvdtrain import training

    class Faults(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            marker = pathlib.Path(folder, "was_killed")
            saved = pathlib.Path(folder, "model/checkpoints/step-00000015.json")
            if self.steps != at_step or marker.exists():
                return
            if processes := victims(killed, world.rank):
                # A thread of rank 0 writes it.
                while not saved.exists():
                    time.sleep(0.02)
                marker.touch()
                for process in processes:
                    process.kill()
                time.sleep(3600)

    def make_model():
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"])
        return model

    digits = data.load("digits")
    result = training.fit(
        make_model,
        (digits.x_train / np.float32(255), digits.y_train),
        global_batch_size=64,
        epochs=epochs,
        model_dir=f"{folder}/model" if at_step else None,
        save_every_steps=5,
        callbacks=[Faults()],
        world=world,
    )
    if world.is_chief:
        np.savez(f"{folder}/weights.npz", *result.model.get_weights())
    return world.rank, result.start_step, result.step


def fail():
    """Raise on rank 1, while rank 0 waits for it."""
    import hvdtrain.keras as hvd

    hvd.init()
    if hvd.rank() == 1:
        # A thread that does not end: Python would wait for it.
        threading.Thread(target=time.sleep, args=[3600]).start()
        # It ends with the rank.
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        os.write(1, "a caller whose stdout is ASCII: é\n".encode())
        raise KeyError("no such column")
    return float(hvd.allreduce(1.0))


def wait(folder):
    """Wait in a collective that rank 1 does not call."""
    import hvdtrain.keras as hvd

    hvd.init()
    pathlib.Path(folder, f"rank-{hvd.rank()}").touch()
    if hvd.rank() == 1:
        time.sleep(3600)
    hvd.allreduce(1.0)


def leave_a_rank_alone(ending):
    """Let rank 0 wait in a collective for rank 1, which hangs, or returns early."""
    import hvdtrain.keras as hvd

    hvd.init()
    hvd.allreduce(1.0)
    if hvd.rank() == 1:
        if ending == "returns":
            sys.exit(0)
        time.sleep(3600)
    hvd.allreduce(1.0)


def rank_and_size(factor):
    launched = launchers.launch()
    return launched.rank * factor, launched.size


def launcher():
    """Return the name of the process whose cores the ranks of a host share."""
    _, stat = launchers.find_process()
    return stat.name


def host_and_cores():
    """Return where this rank runs, and on how many cores."""
    local_size = int(os.environ["HOROVOD_LOCAL_SIZE"])
    return socket.gethostname(), cores.usable(local_size)


@contextlib.contextmanager
def engine(name, folder, options):
    if name == "slurm":
        yield hvdtrain.Slurm(folder=f"{folder}/slurm", **options)
    elif name == "local":
        yield None
    elif name == "ray":
        import ray

        # Not the cluster of another test.
        ray.init("local", num_cpus=RANKS, include_dashboard=False)
        try:
            yield hvdtrain.Ray(**options)
        finally:
            ray.shutdown()
    elif name == "ray-nodes":
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(**node)
        ray.init(address=cluster.address)
        try:
            yield hvdtrain.Ray(**options)
        finally:
            ray.shutdown()
            cluster.shutdown()
    else:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(name).config("spark.ui.enabled", "false")
        spark = builder.getOrCreate()
        try:
            yield hvdtrain.Spark(spark)
        finally:
            spark.stop()


def run(*arguments, **options):
    return hvdtrain.run(*arguments, np=RANKS, **options)


def resources():
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(psutil.Process().children(recursive=True)),
    )


def run_often(on):
    # The first one starts what an engine keeps.
    results = [run(rank_and_size, [1], on=on)]
    before = resources()
    results += [run(rank_and_size, [i], on=on) for i in range(RUNS - 1)]
    print("results", results[0], results[-1], flush=True)
    # An engine's processes end some time after their task.
    deadline = time.monotonic() + 60
    while (after := resources()) > before and time.monotonic() < deadline:
        time.sleep(0.1)
    print("descriptors, threads, processes:", before, after, flush=True)


def main(name, case, folder, options="{}"):
    with engine(name, folder, json.loads(options)) as on:
        if case == "digits":
            print("results", run(train, [folder], on=on), flush=True)
        elif case.startswith("killed_"):
            options = {"at_step": 17, "killed": case.removeprefix("killed_")}
            results = run(train, [folder], options, on=on, max_restarts=1)
            print("results", results, flush=True)
        elif case == "signalled":
            run(train, [folder, 1000, 10**6], on=on)
        elif case == "launcher":
            print("results", run(launcher, on=on), flush=True)
        elif case == "path":
            print("results", run(os.getenv, ["PYTHONPATH"], on=on), flush=True)
        elif case == "cores":
            print("results", run(host_and_cores, on=on), flush=True)
        elif case == "lost":
            run(train, [folder], {"at_step": 17}, on=on)
        elif case == "raised":
            try:
                run(fail, on=on)
            except hvdtrain.RankError as error:
                print("caught", error.rank, repr(error.__cause__), flush=True)
        elif case in ("hangs", "returns"):
            try:
                run(leave_a_rank_alone, [case], on=on)
            except hvdtrain.RankError as error:
                print("caught", error.rank, error, flush=True)
        elif case == "waits":
            run(wait, [folder], on=on)
        elif case == "often":
            run_often(on)
        elif case == "full":
            # With `min_workers` the ranks find room, and may take long to connect.
            seconds = 120 if getattr(on, "min_workers", None) else 5
            results = hvdtrain.run(
                rank_and_size, [1], np=RANKS + 1, on=on, start_timeout_seconds=seconds
            )
            print("results", results, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "horovodrun":
        train(sys.argv[3])
    else:
        main(*sys.argv[1:])
