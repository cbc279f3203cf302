"""Generates pages of the site from the code: a hook of MkDocs, which mkdocs.yml names.

In docs/reference.md, the text between `<!-- NAME -->` and `<!-- end -->` is for readers
of the repository. The site has a table in its place.
"""

import functools
import html
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
# MkDocs loads this file by its path.
sys.path.insert(0, str(ROOT))

from hvdtrain import environment, program  # noqa: E402
from hvdtrain.__main__ import PROGRAMS, source  # noqa: E402

# In a process for each program: absl has one set of flags, and two programs have flags
# of one name.
LIST_FLAGS = """
import importlib, json, sys
from absl import flags
importlib.import_module(sys.argv[1])
modules = flags.FLAGS.flags_by_module_dict()
print(json.dumps([
    {"name": flag.name, "help": flag.help, "default": flag.default,
     "choices": getattr(flag.parser, "enum_values", None)}
    for module, defined in modules.items() for flag in defined
    if not module.startswith("absl") and flag.name != "help"
]))
"""


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the text of a page, with the tables of docs/reference.md."""
    if page.file.src_uri != "reference.md":
        return without_links_to_tests(markdown)
    return fill(markdown)


def without_links_to_tests(markdown: str) -> str:
    """Replace links to tests, which are not on the site, by texts with their names."""
    link = re.compile(r'\[([^\]]+)\]\((?:\.\./)+(tests/\S+) "(\w+)"\)')
    return link.sub(r'<abbr title="\2::\3">\1</abbr>', markdown)


def fill(markdown: str) -> str:
    """Replace the texts between the markers of docs/reference.md by tables."""
    texts = {
        "exit codes": exit_codes(),
        "variables": variables(),
        "flags": "\n\n".join(["## Flags", *map(program_flags, PROGRAMS)]),
    }
    for name, text in texts.items():
        block = re.compile(rf"<!-- {name} -->.*?<!-- end -->", re.DOTALL)
        markdown, count = block.subn(lambda _, text=text: text, markdown)
        if count != 1:
            raise ValueError(
                f"docs/reference.md has {count} blocks {name!r}; expected 1."
            )
    return markdown


def exit_codes() -> str:
    """Return the section of the exit codes."""
    rows = [(code, text) for code, text in program.EXIT_CODES.items()]
    return (
        "## Exit codes\n\nAll programs of hvdtrain have them. `mpirun` and "
        f"`horovodrun` pass them on.\n\n{table(('exit code', 'meaning'), rows)}"
    )


def variables() -> str:
    """Return the section of the environment variables."""
    return "\n\n".join(
        [
            "## Environment variables",
            _variables("variable of hvdtrain", environment.VARIABLES),
            _variables("variable of Horovod", environment.HOROVOD_VARIABLES),
        ]
    )


@functools.cache
def program_flags(name: str) -> str:
    """Return the section of the flags of a program."""
    module = f"hvdtrain.{name}"
    if source(name).stem == "__main__":
        module += ".__main__"
    listed = subprocess.run(
        [sys.executable, "-c", LIST_FLAGS, module],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    rows = [
        (f"`--{flag['name']}`", _default(flag["default"]), _help(flag))
        for flag in json.loads(listed.stdout)
    ]
    return f"### `hvdtrain.{name}`\n\n{table(('flag', 'default', 'meaning'), rows)}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    cells = [list(head), *(list(row) for row in rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])


def _variables(title: str, meanings: Mapping[str, str]) -> str:
    rows = [(f"`{name}`", _escaped(text)) for name, text in sorted(meanings.items())]
    return table((title, "meaning"), rows)


def _default(default: object) -> str:
    if default is None or default == []:
        return ""
    value = ",".join(map(str, default)) if isinstance(default, list) else default
    return f"`{value}`" if value != "" else ""


def _help(flag: Mapping[str, Any]) -> str:
    text = flag["help"]
    if flag["choices"]:
        # absl begins the text with <the choices>.
        text = text.removeprefix(f"<{'|'.join(flag['choices'])}>: ")
    text = _escaped(text)
    if flag["choices"]:
        text += f" One of {', '.join(f'`{each}`' for each in flag['choices'])}."
    return text


def _escaped(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
