"""Workloads: a plain compiled Keras model and its input, by name."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import data, optimizers
from hvdtrain.benchmark import networks
from hvdtrain.benchmark.benchmark_options import WORKLOADS, BenchmarkOptions
from hvdtrain.collectives.objects import group_by_value, name_values
from hvdtrain.data import Sampler
from hvdtrain.data.loading import load_everywhere
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import SharedJobError
from hvdtrain.keras.variables import is_distributed
from hvdtrain.mnist import models
from hvdtrain.mnist.models import compile_classifier

_SYNTHETIC_SHAPES = {"small_cnn": ((32, 32, 3), 10), "resnet18": ((224, 224, 3), 1000)}
_CLASSES = 10

# Inputs, an array or a nest of arrays, and targets.
Batch = tuple[Any, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, without ranks.

    Attributes:
        build: returns a new compiled Keras model whose optimizer is not distributed,
            for a factor of the learning rate, 1 by default.
        batches: `batches(sampler, start_step, end_step)` reads the samples of a
            `Sampler`; None for synthetic inputs.
        num_samples: of the data set.
        batch: inputs, an array or a nest of arrays, and targets of one batch of a rank.
        note: the data, for the report.
        warning: for the user; empty if there is none.
    """

    build: Callable[..., keras.Model]
    batches: Callable[[Sampler, int, int], tf.data.Dataset] | None = None
    num_samples: int = 0
    batch: Batch
    note: str
    warning: str = ""

    def constant_batches(self, copies: int = 1) -> tf.data.Dataset:
        """Return an endless dataset of the one batch, its rows copied so many times."""
        batch = keras.tree.map_structure(
            lambda array: np.concatenate([array] * copies), self.batch
        )
        options = tf.data.Options()
        # Nothing in it has a number of threads to tune, and the end of an iterator
        # would wait for the end of a period of the tuning, seconds after each variant.
        options.autotune.enabled = False
        return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)

    def constant_input(self, copies: int = 1) -> Callable[[int, int], tf.data.Dataset]:
        """Return `input_fn(start_step, end_step)` of the one batch."""
        constant = self.constant_batches(copies)
        return lambda start, end: constant.take(end - start)

    def input(
        self,
        options: BenchmarkOptions,
        *,
        rank: int = 0,
        size: int = 1,
        devices: int = 1,
    ) -> Callable[[int, int], tf.data.Dataset]:
        """Return `input_fn(start_step, end_step)` of a rank.

        The batch of a rank is `devices` times `options.batch_size`.
        """
        if not self.batches:
            return self.constant_input(devices)
        sampler = Sampler(
            num_samples=self.num_samples,
            global_batch_size=options.batch_size * size * devices,
            seed=options.seed,
            rank=rank,
            size=size,
        )
        return functools.partial(self.batches, sampler)


def load(options: BenchmarkOptions, world: World) -> Workload:
    """Return the `Workload` of the options. A collective.

    Raises:
        JobError: the data or the function cannot be loaded, the function fails or does
            not return a compiled Keras model, or the models of the ranks differ.
    """
    name, size = options.workload, options.batch_size
    if name in _SYNTHETIC_SHAPES:
        return _synthetic(options)
    if name in WORKLOADS:
        return _mnist(options, world)
    with fail_together(world):
        workload, shapes = _load_function(name, size, world.rank)
    _check_same_weights(name, gather(world, shapes))
    return workload


def _mnist(options: BenchmarkOptions, world: World) -> Workload:
    dataset, warning = load_everywhere(
        world, options.dataset, data_dir=options.data_dir
    )

    def build(learning_rate_factor: int = 1) -> keras.Model:
        shape, classes = dataset.image_shape, dataset.num_classes
        if options.workload == "mlp512":
            model = models.mlp(shape, num_classes=classes, units=512)
            return _compile_sgd(model, options)
        model = models.BY_NAME[options.workload](shape, num_classes=classes)
        return _compile_sgd(model, options, learning_rate_factor)

    def batches(sampler: Sampler, start: int, end: int) -> tf.data.Dataset:
        return data.batches((dataset.x_train, dataset.y_train), sampler, start, end)

    size = options.batch_size
    return Workload(
        build=build,
        batches=batches,
        num_samples=len(dataset.x_train),
        batch=(dataset.x_train[:size], dataset.y_train[:size]),
        note=f"{dataset.name}, {len(dataset.x_train):,} images",
        warning=warning,
    )


def _synthetic(options: BenchmarkOptions) -> Workload:
    name, batch_size = options.workload, options.batch_size
    shape, classes = _SYNTHETIC_SHAPES[name]

    def build(learning_rate_factor: int = 1) -> keras.Model:
        model = networks.BY_NAME[name](shape, num_classes=classes)
        if name != "resnet18":
            return _compile_sgd(model, options, learning_rate_factor)
        # The setting in which data-parallel methods are commonly compared.
        return compile_classifier(
            model,
            keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True, weight_decay=1e-4),
            jit_compile=options.jit_compile,
        )

    random = np.random.RandomState(0)
    images = random.uniform(size=(batch_size, *shape)).astype("float32")
    labels = random.randint(classes, size=batch_size).astype("int32")
    return Workload(
        build=build,
        batch=(images, labels),
        note=f"synthetic, {'x'.join(map(str, shape))}",
    )


def _compile_sgd(
    model: keras.Model, options: BenchmarkOptions, learning_rate_factor: int = 1
) -> keras.Model:
    rate = optimizers.LEARNING_RATES["sgd"] * learning_rate_factor
    optimizer = optimizers.make("sgd", learning_rate=rate)
    return compile_classifier(model, optimizer, jit_compile=options.jit_compile)


def _load_function(
    name: str, batch_size: int, rank: int
) -> tuple[Workload, list[tuple]]:
    """Return the workload, and the shapes of the weights."""
    function = _import(name)

    def call() -> tuple[keras.Model, Callable[[int, int], Batch] | None]:
        with _failures_of_user_code(name):
            made = function()
        returned = made if isinstance(made, tuple) else (made, None)
        if len(returned) != 2 or not (returned[1] is None or callable(returned[1])):
            types = ", ".join(type(each).__name__ for each in returned)
            raise JobError(
                f"Received a tuple of ({types}) from --workload={name}; expected a "
                "compiled Keras model, or a tuple of it and a function of samples."
            )
        model, samples = returned
        if not isinstance(model, keras.Model) or not model.compiled:
            raise JobError(
                f"Received {type(model).__name__} from --workload={name}; expected a "
                "compiled Keras model."
            )
        if is_distributed(model.optimizer):
            raise JobError(
                f"Received a distributed optimizer from --workload={name}; expected "
                "the plain one: the benchmark trains with and without reduction."
            )
        return model, samples

    model, samples = call()
    if samples:
        with _failures_of_user_code(name):
            batch = samples(batch_size, rank)
        origin = "its own"
    else:
        batch = _synthetic_batch(model, batch_size, name)
        origin = "synthetic"
    inputs = keras.tree.flatten(batch[0])
    shape = " and ".join("x".join(map(str, each.shape[1:])) for each in inputs)
    workload = Workload(
        build=lambda learning_rate_factor=1: call()[0],
        batch=batch,
        note=f"{origin}, {shape}",
    )
    return workload, [tuple(weight.shape) for weight in model.weights]


def _import(name: str) -> Callable[[], Any]:
    module_name, _, function = name.partition(":")
    # `python -m` searches the current directory; a console script does not.
    sys.path.insert(0, "")
    try:
        with _failures_of_user_code(name):
            return getattr(importlib.import_module(module_name), function)
    finally:
        sys.path.remove("")


@contextlib.contextmanager
def _failures_of_user_code(name: str) -> Iterator[None]:
    """Raise an exception of a user's code as a `JobError`, with the user's frames."""
    try:
        yield
    # Also sys.exit: this rank would end, and the others would block in a collective.
    except (Exception, SystemExit) as error:
        not_users = (__file__, importlib.__file__, "<frozen importlib")
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(not_users)
        ]
        raise JobError(
            "".join(traceback.format_list(frames))
            + f"--workload={name} raised {type(error).__name__}: {error}; expected "
            "module:function, found from the current directory or installed, where "
            "the function takes no arguments and returns a compiled Keras model, "
            "or a tuple of it and a function of samples."
        ) from None


def _check_same_weights(name: str, shapes_by_rank: Sequence[list[tuple]]) -> None:
    groups = group_by_value(shapes_by_rank)
    if len(groups) > 1:
        raise SharedJobError(
            f"Received a model with weights of the shapes {name_values(groups)} from "
            f"--workload={name}; expected the same model on all ranks."
        )


def _synthetic_batch(
    model: keras.Model, batch_size: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs and targets of the shapes that the model has."""
    ends = [getattr(model, end, None) or [] for end in ("inputs", "outputs")]
    shapes = [tuple(end.shape[1:]) for end in itertools.chain(*ends)]
    if [len(end) for end in ends] != [1, 1] or any(None in shape for shape in shapes):
        raise JobError(
            f"Received {len(ends[0])} inputs and {len(ends[1])} outputs of the shapes "
            f"{shapes} from --workload={name}; expected one of each, of known shapes."
        )
    random = np.random.RandomState(0)
    shape = (batch_size, *model.input_shape[1:])
    dtype = keras.backend.standardize_dtype(model.inputs[0].dtype)
    if "int" in dtype:
        x = random.randint(2, size=shape).astype(dtype)
    else:
        x = random.uniform(size=shape).astype(dtype)
    return x, _targets(model, random, batch_size)


def _targets(
    model: keras.Model, random: np.random.RandomState, batch_size: int
) -> np.ndarray:
    *others, classes = model.output_shape[1:] or (1,)
    loss = model.loss if isinstance(model.loss, str) else type(model.loss).__name__
    shape = (batch_size, *others)
    if "sparse" in loss.lower():
        return random.randint(classes, size=shape).astype("int32")
    if "crossentropy" in loss.lower().replace("_", "") and classes > 1:
        return np.eye(classes, dtype="float32")[random.randint(classes, size=shape)]
    return random.uniform(size=(*shape, classes)).astype("float32")
