"""The standard streams of a rank."""

import contextlib
import os
import re
import sys
import tempfile

# Messages of TensorFlow at import, written by C++ code that no log level silences.
_NOISE = re.compile(rb"absl::InitializeLog|^I0000 |oneDNN|cpu_feature_guard")
_real_stderr = None


def standard_error():
    """Return the file descriptor of stderr, also inside of `without_noise`."""
    return _real_stderr or 2


@contextlib.contextmanager
def without_noise():
    """Hold back what is written to stderr; at the end, write what is not noise."""
    global _real_stderr
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stderr = _real_stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            _real_stderr = None
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not _NOISE.search(line):
                    os.write(2, line)
