"""Each public class of the installed Keras has a row in the matrix."""

import collections
import functools
import inspect
import pathlib

import keras
import matrix
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "moving" / "equivalence.md"
ROWS = {
    f"{section}.{name}"
    for section, tables in matrix.TABLES.items()
    for rows in tables.values()
    for name in rows
}
CLASSES = {row.split()[0] for row in ROWS} | matrix.NOT_ROWS.keys()
# What the oldest supported Keras has not.
LATER = {
    *(f"layers.Adaptive{k}Pooling{n}D" for k in ("Average", "Max") for n in (1, 2, 3)),
    "layers.ContrastLimitedAdaptiveHistogramEqualization",
    *("optimizers.MultiOptimizer", "optimizers.OptimizerMap"),
    "optimizers.ScheduleFreeAdamW",
    "callbacks.OrbaxCheckpoint",
}


@pytest.mark.parametrize("section", matrix.TABLES)
def test_each_class_of_keras_has_a_row(section):
    module = functools.reduce(getattr, section.split("."), keras)
    names_by_class = collections.defaultdict(set)
    for name, kind in inspect.getmembers(module, inspect.isclass):
        names_by_class[kind].add(f"{section}.{name}")
    missing = [names for names in names_by_class.values() if not names & CLASSES]
    assert not missing, "add rows to tests/parallel/matrix.py"
    names = set().union(*names_by_class.values())
    assert {c for c in CLASSES if c.rpartition(".")[0] == section} - names <= LATER


def test_named_rows_are_rows():
    named = {*matrix.WARNED, *matrix.SAMPLE}
    assert named | matrix.OF_BATCHES | matrix.IN_FLOAT32 <= ROWS


@pytest.mark.parametrize("row", sorted({*matrix.WARNED, *matrix.OF_BATCHES}))
def test_what_differs_is_on_the_page(row):
    assert f"`{row.rpartition('.')[2]}" in PAGE.read_text()
