"""The files of predictions, each complete or absent, and what they were made from.

Of `out="scores-*.parquet"` they are scores-00000-of-00012.parquet and so on, and
_scores.json, which Arrow and Spark leave out when they read a directory.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.directories import DiskDirectory, directory_of
from hvdtrain.job import JobError, World, files
from hvdtrain.job.agreement import fail_together, gather, on_chief
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
        self._directory = directory_of(directory or ".")
        self.paths = tuple(str(self._directory.path(name)) for name in self._parts)

    def prepare(self, made_from: Mapping[str, Any], world: World) -> list[int]:
        """Return the numbers of the parts that are missing. A collective.

        Raises:
            SharedJobError: on all ranks, if one cannot use the directory, or files of
                other predictions are there.
        """
        manifest = json.dumps(made_from, indent=2)
        on_chief(world, lambda: self._prepare(manifest))
        with fail_together(world), self._using(self._manifest):
            if self._directory.read(self._manifest) != manifest:
                raise JobError(
                    f"Received another {self._manifest} in {self._directory} than rank "
                    "0; expected a directory that all ranks share."
                )
            sizes = self._directory.sizes()
        # As in `_prepare`; no part is without content.
        missing = [n for n, name in enumerate(self._parts) if not sizes.get(name)]
        # A store may list an object late, and on some ranks only.
        return gather(world, missing)[0]

    def write(self, number: int, outputs: Columns) -> None:
        """Write a part."""
        first = number * self._size
        numbers = np.arange(first, first + len(next(iter(outputs.values()))))
        columns = {NUMBER: numbers, **outputs}
        write, _ = FORMATS[self._suffix]
        name = self._parts[number]
        with self._using(name), self._directory.write(name) as path:
            write(path, columns)

    def _prepare(self, manifest: str) -> None:
        with self._using(self._manifest):
            if isinstance(self._directory, DiskDirectory):
                files.make_directory(str(self._directory))
            # A crash of the machine may leave a file without content.
            names = [name for name, size in self._directory.sizes().items() if size]
            if self._manifest in names:
                before = json.loads(self._directory.read(self._manifest))
                after = json.loads(manifest)
                differing = [key for key in after if before.get(key) != after[key]]
                found = f"{self._manifest} of other {', '.join(differing)}"
            else:
                differing = [name for name in self._parts if name in names][:1]
                found = f"{', '.join(differing)} without {self._manifest}"
        if differing:
            raise JobError(
                f"Received {self._directory} with {found}; expected the files of these "
                "predictions alone: choose another out, or remove them."
            )
        if self._manifest not in names:
            name = self._manifest
            with self._using(name), self._directory.write(name) as path:
                path.write_text(manifest)

    def _using(self, name: str) -> contextlib.AbstractContextManager[None]:
        return files.one_line_errors(
            f"use {name} in {self._directory}",
            # Those of pyarrow, json and TensorFlow among them.
            errors=(
                *(OSError, ValueError, AttributeError, RecursionError),
                tf.errors.OpError,
            ),
            remedy="expected a directory with free space, which all ranks share and "
            "this user can write to: choose another out",
        )
