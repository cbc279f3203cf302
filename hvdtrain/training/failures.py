"""What a failed run leaves in its directory."""

import contextlib
import datetime
import json
import pathlib
import socket

from hvdtrain.job import tracebacks
from hvdtrain.job.files import atomic_write
from hvdtrain.job.world import PreemptedError

_DIRECTORY = "errors"


@contextlib.contextmanager
def recorded(model_dir, world):
    """Write an error file of this rank, if the block raises an exception.

    The file `errors/rank-1.json` has rank, host, time, the error, and its traceback.
    Those of an earlier run are deleted. A rank that does not see the directory, and
    one that cannot write, leave no file: the exception is the same.

    Args:
        model_dir: the directory of the run.
        world: the `World`.
    """
    directory = pathlib.Path(model_dir) / _DIRECTORY
    if world.is_chief:
        for path in directory.glob("rank-*.json"):
            path.unlink(missing_ok=True)
    try:
        yield
    except PreemptedError:
        raise
    except Exception as error:
        with contextlib.suppress(OSError):
            _write_error(directory, world, error)
        raise


def _write_error(directory, world, error):
    if not directory.parent.is_dir():
        return
    directory.mkdir(exist_ok=True)
    last_lines, whole = tracebacks.describe(error)
    values = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "error": last_lines,
        "traceback": whole,
    }
    with atomic_write(directory / f"rank-{world.rank}.json") as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n")
