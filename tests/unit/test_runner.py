"""`hvdtrain.run`: what needs no engine."""

import multiprocessing
import sys
import threading
import time

import cloudpickle
import pytest

import hvdtrain
from hvdtrain.runner import agent, channel, slurm


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"function": "train"}, "function='train'; expected a function"),
        ({"args": "ab"}, "args='ab'; expected a list of arguments"),
        ({"args": 3}, "args=3; expected a list of arguments"),
        ({"kwargs": [1]}, r"kwargs=\[1\]; expected a dictionary"),
        ({"np": "2"}, "np='2'; expected a number of ranks"),
        ({"np": 2.0}, r"np=2\.0; expected a number of ranks"),
        ({"np": 0}, "np=0 and max_restarts=0; expected 1 rank or more"),
        ({"max_restarts": -1}, "np=1 and max_restarts=-1; expected .* 0 restarts"),
        ({"max_restarts": None}, "max_restarts=None; expected a number"),
        ({"on": "ray"}, "on='ray'; expected an engine, such as"),
        ({"on": slurm.Slurm}, "on=<class 'hvdtrain.runner.slurm.Slurm'>; expected an"),
    ],
)
def test_wrong_arguments_are_refused_by_the_caller(options, error):
    with pytest.raises((TypeError, ValueError), match=f"^Received {error}"):
        hvdtrain.run(**{"function": print, "np": 1} | options)


@pytest.mark.parametrize(
    ("engine", "module", "package"),
    [
        ("Ray", "ray", "ray"),
        ("Spark", "spark", "pyspark"),
        ("Slurm", "slurm", "submitit"),
    ],
)
def test_an_engine_without_its_package_names_the_remedy(
    monkeypatch, engine, module, package
):
    monkeypatch.delitem(sys.modules, f"hvdtrain.runner.{module}", raising=False)
    # An import of it raises ModuleNotFoundError.
    monkeypatch.setitem(sys.modules, package, None)
    error = f"^hvdtrain.{engine} needs {package}: pip install {package}$"
    with pytest.raises(ModuleNotFoundError, match=error):
        getattr(hvdtrain, engine)


def test_a_thread_that_does_not_end_is_killed_with_a_line(monkeypatch):
    monkeypatch.setattr(agent, "_EXIT_SECONDS", 0.5)

    def start_thread():
        print("a line without an end", end="", file=sys.stderr, flush=True)
        threading.Thread(target=time.sleep, args=[3600]).start()

    payload = cloudpickle.dumps((start_thread, (), {}))
    start = channel.StartRanks(payload, ({"HOROVOD_RANK": "0"},))
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        agent._run_ranks(theirs, start)
        messages = [ours.recv()]
        while not isinstance(messages[-1], channel.Ended):
            messages.append(ours.recv())
    assert messages[-1].exit_code == -9
    text = "".join(message.text for message in messages[:-1])
    assert text == (
        "a line without an end\n"
        "hvdtrain.run: the process is killed 0.5 s after its function has returned: "
        "a thread that is not a daemon still runs.\n"
    )
