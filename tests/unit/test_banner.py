"""What is printed about a run before its first step."""

import dataclasses

import pytest
from toy import start

from hvdtrain.banner import banner


def lines(**changes):
    text = banner(dataclasses.replace(start(0), **changes))
    parts = (line.partition("  ") for line in text.splitlines())
    return {label: rest.strip() for label, _, rest in parts}


def test_all_lines():
    assert banner(start(0)) == (
        "Keras 3\n"
        "ranks          2 on node1; Gloo; reduction: shared memory; "
        "threads per rank: 1\n"
        "model          mlp, sgd\n"
        "batch          4 per rank x 2 ranks = 8; 100 steps\n"
        "learning rate  0.5"
    )


def test_what_xla_compiles():
    assert "XLA" not in lines()
    text = "compiles forward and backward pass; the reduction follows them"
    assert lines(compiles_gradients=True)["XLA"] == text


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        (
            {"accumulation_steps": 3, "max_steps": 99},
            "4 per rank x 2 ranks x 3 accumulated = 24; 33 updates",
        ),
        (
            {"local_batch_sizes": [4, 3], "global_batch_size": 7},
            "7 on 2 ranks = 7; 100 steps",
        ),
        (
            {
                "ranks": 4,
                "mesh": {"data": 1, "pipeline": 2, "model": 2},
                "local_batch_sizes": [8],
            },
            "8 per replica x 1 replica = 8; 100 steps",
        ),
    ],
)
def test_batch(changes, batch):
    assert lines(**changes)["batch"] == batch


@pytest.mark.parametrize(
    ("replicas_before", "changes", "end"),
    [
        (2, {}, ""),
        (4, {}, ", which 4 ranks wrote"),
        (1, {}, ", which 1 rank wrote"),
        (
            2,
            {"ranks": 4, "mesh": {"data": 1, "pipeline": 1, "model": 4}},
            ", which 2 replicas wrote",
        ),
    ],
)
def test_a_job_that_continues(replicas_before, changes, end):
    path = "run/checkpoints/step-00003732.json"
    found = lines(
        step=3732, checkpoint=path, replicas_before=replicas_before, **changes
    )
    assert found["continues"] == f"at step 3,732 from {path}{end}"


def test_ranks():
    several = lines(ranks=3, hosts=["a", "a", "b"], threads=[2, 2, 1])
    assert several["ranks"].startswith("2 on a, 1 on b; Gloo;")
    assert several["ranks"].endswith("threads per rank: 1 or 2")
    mesh = {"data": 1, "pipeline": 1, "model": 1}
    assert lines(ranks=1, hosts=["a"], threads=[0], mesh=mesh)["ranks"] == (
        "1 on a; threads per rank: 0"
    )
    limited = lines(cpu_quota="1.5 of 16 cores")
    assert limited["ranks"].endswith("threads per rank: 1; CPU quota: 1.5 of 16 cores")
    sharded = lines(mesh={"data": 1, "pipeline": 1, "model": 2})
    assert sharded["mesh"] == "data 1 x pipeline 1 x model 2"
