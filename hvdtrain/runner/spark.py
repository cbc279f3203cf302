"""Agents as the tasks of a barrier stage of Spark."""

import contextlib
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from hvdtrain.runner import agent
from hvdtrain.runner.channel import Address
from hvdtrain.runner.engine import PlacedAgents, RunError

_END_SECONDS = 20


class Spark:
    """Tasks of a barrier stage, one per rank, which start at once or not at all."""

    is_local = False

    def __init__(self, spark: SparkSession) -> None:
        """Place ranks on the executors of `spark`.

        Args:
            spark: a session with a SparkContext, not one of Spark Connect.
        """
        self._spark = spark

    @contextlib.contextmanager
    def place(self, address: Address, size: int) -> Iterator[PlacedAgents]:
        """Start a stage with a task for each rank; see `Engine.place`."""
        stage = _Stage(self._context(), address, size)
        advice = (
            "A barrier stage needs a free core of Spark for each rank, and no dynamic "
            "allocation"
        )
        try:
            yield PlacedAgents(size, stage.failure, lambda: advice)
            stage.join()
        finally:
            stage.cancel()

    def _context(self) -> Any:
        try:
            return self._spark.sparkContext
        except Exception as error:
            raise RunError(
                "Received a session of Spark Connect, which has no barrier stages of "
                "RDDs; expected a classic session, which has a SparkContext."
            ) from error

    def __str__(self) -> str:
        """Return the name of the engine in messages."""
        return "Spark"


class _Stage:
    """A barrier stage, which a thread waits for."""

    def __init__(self, context: Any, address: Address, size: int) -> None:
        self._context = context
        self._group = f"hvdtrain-{uuid.uuid4()}"
        self._error = ""
        self._thread: threading.Thread = InheritableThread(
            target=self._collect, args=[address, size], daemon=True
        )
        self._thread.start()

    def _collect(self, address: Address, size: int) -> None:
        def serve(_: Iterable[int]) -> list[int]:
            agent.serve(address)
            return []

        self._context.setJobGroup(self._group, "hvdtrain.run", interruptOnCancel=True)
        try:
            tasks = self._context.parallelize(range(size), size).barrier()
            tasks.mapPartitions(serve).collect()
            self._error = "the stage has ended"
        except Exception as error:
            cause = getattr(error, "java_exception", None) or error
            lines = str(cause).strip().splitlines()
            self._error = lines[0] if lines else type(error).__name__

    def failure(self) -> str:
        """Return why the stage has ended, or an empty text."""
        return "" if self._thread.is_alive() else self._error

    def join(self) -> None:
        """Wait until the tasks have ended."""
        self._thread.join(_END_SECONDS)

    def cancel(self) -> None:
        """End the stage, without another attempt of Spark's."""
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(_END_SECONDS)
