"""Runs the lines of docs/moving/distribute.md that tf.distribute has: `-` of its diffs.

In one process, by `MirroredStrategy` on two devices. Writes what each diff computes.
"""

import linecache
import os
import pathlib
import pickle
import re
import sys

import numpy as np

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "moving" / "distribute.md"
# In place of the strategies of the page, some of which need a cluster.
TWO = (
    'tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], '
    "tf.distribute.ReductionToOneDevice())"
)


def sides():
    """Return the two scripts of each diff of the page, in their order."""
    diffs = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    return [tuple(_side(diff, mark) for mark in "-+") for diff in diffs]


def _side(diff, mark):
    kept = [line[2:] for line in diff.splitlines() if line[:1] in (mark, " ", "")]
    return "\n".join(kept)


def names(keras, tf):
    """Return what the scripts of the page start with."""
    rng = np.random.default_rng(0)
    x, x_test = rng.normal(size=(2, 64, 6)).astype("float32")

    def make_model(layer=None):
        keras.utils.set_random_seed(7)
        is_table = hasattr(layer, "input_dim")
        shape, dtype = ((3,), "int32") if is_table else ((6,), "float32")
        layers = [layer] if layer else []
        layers += [keras.layers.Flatten()] if is_table else []
        layers += [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])

    return {
        "keras": keras,
        "tf": tf,
        "make_model": make_model,
        "uniform": keras.initializers.RandomUniform(seed=3),
        "x": x,
        "y": x.sum(1, keepdims=True),
        "x_test": x_test,
        "y_test": x_test.sum(1, keepdims=True),
        "ids": rng.integers(0, 1000, (64, 3)),
    }


def run(script, namespace):
    """Run one side of a diff; return its `result`, if any, and the model's weights.

    Those of a table are left out, since ranks have shards of it: `result` shows them.
    """
    # AutoGraph reads the source of a function.
    name = f"<diff {len(linecache.cache)}>"
    linecache.cache[name] = (len(script), None, script.splitlines(keepends=True), name)
    exec(compile(script, name, "exec"), namespace)
    layers = namespace["model"].layers
    weights = [
        np.array(weight)
        for layer in layers
        if not hasattr(layer, "input_dim")
        for weight in layer.get_weights()
    ]
    return namespace.pop("result", None), weights


def main():
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import tensorflow as tf

    [cpu] = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, halves)
    namespace = names(keras, tf) | {"resolver": None, "partitioner": None}
    namespace["temporary"] = "."
    scripts = [
        re.sub(r"tf\.distribute\.\w+Strategy\(.*\)", TWO, script)
        for script, _ in sides()
    ]
    found = [run(script, namespace) for script in scripts]
    pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
