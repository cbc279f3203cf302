"""Predictions of all ranks, each sample once, in the order of the source.

The source is cut into parts, and each part into batches, which do not depend on the
number of ranks: any number of them computes the same bits.
"""

import dataclasses
import functools
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import parallel
from hvdtrain.checkpoint.state_variables import compute_digest
from hvdtrain.data.batching import one_pass
from hvdtrain.data.sources.source import Source
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import check_same, fail_together, gather
from hvdtrain.parallel.replicas import Replicas, get_mesh
from hvdtrain.sharding.shards import has_summed_gradients, is_split_over_ranks
from hvdtrain.training.building import check_no_distribution
from hvdtrain.training.due import MAX_GROWTH, agree_on_pause
from hvdtrain.training.inputs import as_samples, check_source, digest
from hvdtrain.training.prediction_files import PredictionFiles
from hvdtrain.training.prediction_formats import Columns, as_columns, describe

# By default, a source of any length has work for some tens of ranks, and a part, which
# its rank collects, fits into memory.
_MIN_PARTS, _MAX_PART_SAMPLES, _MAX_PART_BYTES = 64, 1 << 16, 64 << 20


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Paths or addresses of all files, in the order of the source, and its length."""

    paths: tuple[str, ...]
    samples: int


def predict(
    model: keras.Model,
    source: Any,
    *,
    world: World,
    out: str | os.PathLike[str] | None = None,
    local_batch_size: int = 32,
    samples_per_part: int | None = None,
    mesh: parallel.Mesh | None = None,
    workers: int | None = None,
) -> Any:
    """Predict each sample of a source once, in its order. A collective.

    The source is cut into parts, which the ranks share. A file has one part: it is
    complete or absent. A job that was killed predicts the missing ones when it is
    started again, on any number of ranks.

    Args:
        model: a Keras model with the same weights on all ranks, compiled or not. Its
            `predict_step` is called as Keras' `predict` calls it.
        source: samples, as for `data.batches`: inputs, or tuples of inputs and targets,
            of which the inputs are predicted.
        world: what `job.start` returned.
        out: path or address of the files, in a directory that all ranks share, with one
            `*` in the name: "scores-*.parquet", ".npy" or ".tfrecord". None returns the
            predictions.
        local_batch_size: samples that a rank predicts at a time.
        samples_per_part: of a file, rounded up to batches; they fit into memory.
        mesh: over which the model is sharded, if it is not compiled; see `fit`.
        workers: see `data.batches`.

    Returns:
        `Predictions`; without `out` what Keras' `predict` returns, on all ranks.

    Raises:
        SharedJobError: on all ranks, if source or weights differ between the ranks,
            existing files are of others, or an output cannot be written.
    """
    made_from: dict[str, Any] = {
        "local_batch_size": local_batch_size,
        "samples_per_part": samples_per_part,
    }
    with fail_together(world):
        check_no_distribution()
        samples = as_samples(source)
        made_from["source"] = samples.fingerprint()
        read = functools.partial(
            one_pass, rank=0, size=1, local_batch_size=local_batch_size, workers=workers
        )
        step = _make_step(model, read(samples).element_spec)
        first = next(iter(read(samples)))
    check_same(world, {"out": str(out), **made_from})
    with fail_together(world):
        outputs = step(first)
        columns = as_columns(outputs, first)
    made_from |= {
        "samples": [check_source(samples, world), digest(first)],
        "weights": _digest_weights(model, world),
        "outputs": describe(columns),
    }
    with fail_together(world):
        replicas = Replicas.of(world, _check_mesh(model, mesh or get_mesh(model)))
        size = _choose_size(samples_per_part, len(samples), columns)
        steps = -(-size // local_batch_size)
        size = steps * local_batch_size
        files = (
            None if out is None else PredictionFiles(out, len(samples), size, columns)
        )
    missing: Iterable[int] = range(-(-len(samples) // size))
    if files:
        missing = files.prepare(made_from, world)
    own = list(missing)[replicas.index :: replicas.size]
    batches = read(_Share(samples, own, size)) if own else ()
    parts = _predict_parts(step, batches, own, steps, describe(columns))
    repeat = (lambda: step(first)) if is_split_over_ranks(model.weights) else None
    found: dict[int, Columns] = {}
    keep = files.write if files else found.__setitem__
    is_kept = world.rank == replicas.ranks(replicas.index)[0]
    for complete in _take_together(parts, repeat, world):
        with fail_together(world):
            for number, part in complete.items() if is_kept else ():
                keep(number, part)
    if files:
        return Predictions(files.paths, len(samples))
    for of_rank in gather(world, found):
        found |= of_rank
    columns = _concatenate([found[number] for number in sorted(found)])
    return keras.tree.pack_sequence_as(outputs, list(columns.values()))


def _make_step(model: keras.Model, spec: Any) -> Callable[[Any], Any]:
    """Return Keras' step, without AutoGraph as there: one graph for all sizes."""
    if model.run_eagerly:
        return model.predict_step
    return tf.function(
        model.predict_step,
        input_signature=[spec],
        autograph=False,
        jit_compile=model.jit_compile and not is_split_over_ranks(model.weights),
    )


def _choose_size(size: int | None, samples: int, columns: Columns) -> int:
    """Return the samples of a part, which do not depend on the number of ranks."""
    if size is None:
        row_bytes = 1 + sum(column[:1].nbytes for column in columns.values())
        limits = samples // _MIN_PARTS, _MAX_PART_BYTES // row_bytes, _MAX_PART_SAMPLES
        return max(1, min(limits))
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1:
        raise JobError(
            f"Received samples_per_part={size}; expected 1 or more, an integer."
        )
    return number


class _Share(Source):
    """The samples of some parts of a source, one after the other."""

    def __init__(self, source: Source, parts: Sequence[int], size: int) -> None:
        self.parse, self.decode, self.locks = source.parse, source.decode, source.locks
        self.is_remote = source.is_remote
        self._source = source
        self._starts = np.array(parts) * size
        self._size = size

    def __len__(self) -> int:
        ends = np.minimum(self._starts + self._size, len(self._source))
        return int(np.sum(ends - self._starts))

    def read(self, indices: np.ndarray) -> Any:
        parts, offsets = np.divmod(indices, self._size)
        return self._source.read(self._starts[parts] + offsets)


def _predict_parts(
    step: Callable[[Any], Any],
    batches: Iterable[Any],
    numbers: Sequence[int],
    steps: int,
    expected: Mapping[str, str],
) -> Iterator[dict[int, Columns]]:
    """Predict a batch at a time; a part has `steps` batches, and the last one fewer.

    Yield the parts that are complete, by number: one at its last batch.
    """
    groups = itertools.groupby(enumerate(batches), lambda item: item[0] // steps)
    for index, of_part in groups:
        collected: list[Columns] = []
        for _, batch in of_part:
            if collected:
                yield {}
            collected.append(as_columns(step(batch), batch))
            if (found := describe(collected[-1])) != expected:
                raise JobError(
                    f"Received the outputs {found} in part {numbers[index]}; expected "
                    f"{expected}, as of the first batch: pad them to one shape."
                )
        yield {numbers[index]: _concatenate(collected)}


def _concatenate(batches: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def _take_together(
    parts: Iterator[dict[int, Columns]],
    repeat: Callable[[], object] | None,
    world: World,
) -> Iterator[dict[int, Columns]]:
    """Yield the parts of about a second, until all ranks have no more parts.

    A collective: all ranks take equal steps. If they predict together, a rank without
    parts calls `repeat`. A failure then ends this rank, and thereby the job: the others
    block in a collective of the model.
    """
    done_ranks, pause = 0, 1
    while done_ranks < world.size:
        begin, complete = time.monotonic(), dict[int, Columns]()
        with nullcontext() if repeat else fail_together(world):
            for _ in range(pause):
                if (part := next(parts, None)) is not None:
                    complete |= part
                elif repeat:
                    repeat()
        yield complete
        # A chief without batches cannot measure their time.
        if part is not None:
            seconds = max(time.monotonic() - begin, 1e-9)
            pause = max(1, min(int(pause / seconds), MAX_GROWTH * pause))
        done = [part is None]
        pause, [done_ranks] = agree_on_pause(world, pause, done, name="Predictions")


def _check_mesh(model: keras.Model, mesh: parallel.Mesh | None) -> parallel.Mesh | None:
    """Return the mesh; raise `JobError` if a model is sharded over an unknown one."""
    # Tables that are sharded over replicas need none.
    weights = [w for w in model.weights if not has_summed_gradients([w])]
    if mesh is None and is_split_over_ranks(weights):
        raise JobError(
            "Received a sharded model without its mesh; expected mesh=, or a model "
            "that is compiled with hvd.DistributedOptimizer(optimizer, mesh=mesh)."
        )
    return mesh


def _digest_weights(model: keras.Model, world: World) -> str:
    """Return a digest of the weights of all ranks. A collective.

    Raise `SharedJobError` on all ranks if weights that are replicated differ.
    """
    digests: tuple[list[int], list[int]] = [], []
    for weight in model.weights:
        values = digests[is_split_over_ranks([weight])]
        values.append(compute_digest(weight.numpy()))
    replicated, split = (digest(tf.constant(values)) for values in digests)
    check_same(world, {"weights": replicated})
    # The shards of replicas are equal, and count once.
    return digest(tf.constant([replicated, *dict.fromkeys(gather(world, split))]))
