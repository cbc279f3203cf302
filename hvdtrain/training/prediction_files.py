"""The files of predictions, each complete or absent, and what they were made from.

Of `out="scores-*.parquet"` they are scores-00000-of-00012.parquet and so on, and
_scores.json, which Arrow and Spark leave out when they read a directory.
"""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.job import JobError, World, files
from hvdtrain.job.agreement import fail_together, gather, on_chief
from hvdtrain.stores.object_store import ObjectStore
from hvdtrain.training.prediction_formats import FORMATS, NUMBER, Columns, check


class PredictionFiles:
    """The files that `out` names, such as "scores-*.parquet", one for each part.

    Raises:
        JobError: `out` cannot be used, or its format cannot hold the outputs.
    """

    def __init__(
        self, out: str | os.PathLike[str], samples: int, size: int, outputs: Columns
    ) -> None:
        count = -(-samples // size)
        directory, name = os.path.split(os.fspath(out))
        prefix, _, rest = name.partition("*")
        self._suffix = os.path.splitext(name)[1]
        if name.count("*") != 1 or "*" in directory or self._suffix not in FORMATS:
            raise JobError(
                f"Received out={os.fspath(out)}; expected one * in the name of the "
                f"file, as in scores-*.parquet, and a suffix of {', '.join(FORMATS)}."
            )
        check(self._suffix, outputs)
        self._size = size
        self._parts = [f"{prefix}{n:05}-of-{count:05}{rest}" for n in range(count)]
        stem = f"{prefix}{rest.removesuffix(self._suffix)}".strip("-_.")
        self._manifest = f"_{stem or 'predictions'}.json"
        self._store = ObjectStore(directory) if files.is_address(directory) else None
        self._place = directory if self._store else files.local_path(directory or ".")
        self.paths = tuple(os.path.join(self._place, name) for name in self._parts)

    def prepare(self, made_from: Mapping[str, Any], world: World) -> list[int]:
        """Return the numbers of the parts that are missing. A collective.

        Raises:
            SharedJobError: on all ranks, if one cannot use the directory, or files of
                other predictions are there.
        """
        manifest = json.dumps(made_from, indent=2)
        on_chief(world, lambda: self._prepare(manifest))
        with fail_together(world), self._using(self._manifest):
            if self._read() != manifest:
                raise JobError(
                    f"Received another {self._manifest} in {self._place} than rank 0; "
                    "expected a directory that all ranks share."
                )
            names = self._names()
        missing = [n for n, name in enumerate(self._parts) if name not in names]
        # A store may list an object late, and on some ranks only.
        return gather(world, missing)[0]

    def write(self, number: int, outputs: Columns) -> None:
        """Write a part."""
        first = number * self._size
        numbers = np.arange(first, first + len(next(iter(outputs.values()))))
        columns = {NUMBER: numbers, **outputs}
        write, _ = FORMATS[self._suffix]
        self._write(self._parts[number], lambda path: write(path, columns))

    def _prepare(self, manifest: str) -> None:
        with self._using(self._manifest):
            if not self._store:
                files.make_directory(self._place)
            names = self._names()
            if self._manifest in names:
                before, after = json.loads(self._read()), json.loads(manifest)
                differing = [key for key in after if before.get(key) != after[key]]
                found = f"{self._manifest} of other {', '.join(differing)}"
            else:
                differing = [name for name in self._parts if name in names][:1]
                found = f"{', '.join(differing)} without {self._manifest}"
        if differing:
            raise JobError(
                f"Received {self._place} with {found}; expected the files of these "
                "predictions alone: choose another out, or remove them."
            )
        if self._manifest not in names:
            self._write(self._manifest, lambda path: path.write_text(manifest))

    def _names(self) -> set[str]:
        return {*(self._store.sizes() if self._store else os.listdir(self._place))}

    def _read(self) -> str:
        if self._store:
            return self._store.read(self._manifest).decode()
        return pathlib.Path(self._place, self._manifest).read_text()

    def _write(self, name: str, write: Callable[[pathlib.Path], object]) -> None:
        with self._using(name), tempfile.TemporaryDirectory() as directory:
            place = directory if self._store else self._place
            with files.atomic_write(os.path.join(place, name)) as path:
                write(path)
            if self._store:
                self._store.upload(pathlib.Path(place, name), name)

    def _using(self, name: str) -> contextlib.AbstractContextManager[None]:
        return files.one_line_errors(
            f"use {name} in {self._place}",
            # Those of pyarrow, json and TensorFlow among them.
            errors=(OSError, ValueError, AttributeError, tf.errors.OpError),
            remedy="expected a directory with free space, which all ranks share and "
            "this user can write to: choose another out",
        )
