"""The README's tree is the tree."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def described_files():
    """Yields every path in the README's tree; its folders end with a slash."""
    tree = re.search(
        r"```\n(hvdtrain/\n.*?)```", ROOT.joinpath("README.md").read_text(), re.S
    )
    folders = []
    for line in tree.group(1).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name] if name.endswith("/") else []
        yield "".join(folders if name.endswith("/") else [*folders, name])


def test_everything_in_the_tree_is_there():
    missing = [path for path in described_files() if not (ROOT / path).exists()]
    assert not missing


def test_every_module_is_in_the_tree():
    described = set(described_files())
    for folder in ("hvdtrain", "hvdtrain/keras"):
        for path in (ROOT / folder).iterdir():
            if path.name.startswith("__"):
                continue
            name = str(path.relative_to(ROOT)) + ("/" if path.is_dir() else "")
            assert name in described
