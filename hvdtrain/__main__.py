"""Lists the programs of the package: python -m hvdtrain."""

import ast
import pathlib
import sys

from hvdtrain import __version__

PROGRAMS = ("mnist", "launch", "verify", "benchmark", "report", "doctor", "install")


def page() -> str:
    """Return a line for each program, from its --help."""
    lines = [f"hvdtrain {__version__}. The programs, each with --help:"]
    lines += [f"python -m hvdtrain.{name:<9}  {_summary(name)}" for name in PROGRAMS]
    return "\n".join(lines)


def source(program: str) -> pathlib.Path:
    """Return the file of a program: the `__main__` of its package."""
    return pathlib.Path(__file__).parent / program / "__main__.py"


def _summary(program: str) -> str:
    # Not imported: each program defines flags.
    text = ast.get_docstring(ast.parse(source(program).read_text("utf-8")))
    return (text or "").partition("\n")[0]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"Unexpected argument: {sys.argv[1]}\n{page()}", file=sys.stderr)
        sys.exit(2)
    print(page())
