"""What `hvdtrain.run` needs of an engine, and the engine of local processes."""

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from hvdtrain.runner.agent import search_path
from hvdtrain.runner.channel import Address

_END_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class PlacedAgents:
    """Agents that an engine places.

    Attributes:
        size: number of slots of all agents.
        failure: returns why agents that have not connected will not do so, or an empty
            text.
        advice: returns a sentence for the case that they do not connect in time.
    """

    size: int
    failure: Callable[[], str]
    advice: Callable[[], str] = str


class Engine(Protocol):
    """Places agents, each of which calls `runner.agent.serve`."""

    @property
    def is_local(self) -> bool:
        """Whether all agents are on the caller's host."""
        ...

    def place(
        self, address: Address, size: int
    ) -> contextlib.AbstractContextManager[PlacedAgents]:
        """Place agents that connect to `address`, and remove them at the end.

        Raises:
            RunError: the engine cannot place `size` ranks.
        """
        ...


class RunError(RuntimeError):
    """A job of `hvdtrain.run` has not started, or has failed."""

    def _render_traceback_(self) -> list[str]:
        # IPython prints these lines in a notebook. Its own text is 50 lines with the
        # code of frames of this package.
        return [f"{type(self).__name__}: {self}"]


class Local:
    """Processes on the caller's host, the default of `hvdtrain.run`."""

    is_local = True

    @contextlib.contextmanager
    def place(self, address: Address, size: int) -> Iterator[PlacedAgents]:
        """Start one agent; see `Engine.place`."""
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "hvdtrain.runner.agent"],
            env=os.environ | {"PYTHONPATH": search_path()},
            stdin=subprocess.PIPE,
            # Ctrl-C of the caller's terminal reaches the caller, which ends the ranks.
            start_new_session=True,
        ) as process:
            assert process.stdin is not None
            python_path = os.environ.get("PYTHONPATH", "")
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(
                    pickle.dumps((address, size, python_path, os.getpid()))
                )
                process.stdin.close()

            def failure() -> str:
                code = process.poll()
                return "" if code is None else f"its process ended with code {code}"

            try:
                yield PlacedAgents(size, failure)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
            finally:
                process.kill()

    def __str__(self) -> str:
        """Return the name of the engine in messages."""
        return "local processes"
