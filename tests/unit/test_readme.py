"""The tree of packages, and the Python in the documents, are of this package."""

import ast
import inspect
import pathlib
import re
import textwrap

import pytest

import hvdtrain.keras
from hvdtrain import data, job, parallel, training

MODULES = {
    "data": data,
    "job": job,
    "parallel": parallel,
    "training": training,
    "hvd": hvdtrain.keras,
}
ROOT = pathlib.Path(__file__).parents[2]
TREE = ROOT / "CONTRIBUTING.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("[de]*/**/*.md")])


def described_files():
    """Yields every path in the tree; its folders end with a slash."""
    tree = re.search(r"```\n(hvdtrain/\n.*?)```", TREE.read_text(), re.S)
    folders = []
    for line in tree.group(1).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if depth > 3:
            # A description goes on.
            continue
        name = line.split()[0]
        folders[depth:] = [name] if name.endswith("/") else []
        yield "".join(folders if name.endswith("/") else [*folders, name])


def packages():
    """Yields every package below hvdtrain, in the notation of the tree."""
    for path in (ROOT / "hvdtrain").rglob("__init__.py"):
        yield f"{path.relative_to(ROOT).parent}/"


def test_everything_in_the_tree_is_there():
    missing = [path for path in described_files() if not (ROOT / path).exists()]
    assert not missing


def test_every_package_is_in_the_tree():
    assert not {*packages()} - {*described_files()}


def test_lines_are_short():
    """Tables, commands and their output are written as they are."""
    long = []
    for page in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for line in text.splitlines():
            # What a link leads to is not part of the text.
            if len(re.sub(r"\]\([^)]*\)", "]", line)) > 100 and line[0] not in "|#":
                long.append(f"{page.name}: {line}")
    assert not long


def test_no_sentence_becomes_a_list():
    """A line that begins with the number at the end of a sentence is an item."""
    for page in DOCUMENTS:
        assert not re.findall(r"^ *\d{2,}\. .*", page.read_text(), re.M), page.name


def anchors(page):
    """Return the anchors of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def test_links_lead_to_files_and_headings():
    """The build of the site checks the links between its pages as well."""
    broken = []
    for page in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith("https://"):
                continue
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def calls():
    """Yields the page, source and node of each call of the package in the documents."""
    for page in DOCUMENTS:
        for block in re.findall(r"```py(?:thon)?\n(.*?)```", page.read_text(), re.S):
            for node in ast.walk(ast.parse(textwrap.dedent(block))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield page.name, ast.unparse(node.func), node


def test_calls_in_the_documents_fit_the_functions():
    checked = 0
    for page, name, node in calls():
        first, *rest = name.split(".")
        target = MODULES.get(first)
        for part in rest:
            target = getattr(target, part) if target else None
        if target is None:
            continue
        keywords = {each.arg: None for each in node.keywords if each.arg}
        try:
            inspect.signature(target).bind_partial(**keywords)
        except TypeError as error:
            pytest.fail(f"{page}: {name}: {error}")
        checked += 1
    assert checked > 20


def classes(source):
    """Return the methods of each class in `source`, without docstrings."""
    return [
        [ast.unparse(each) for each in node.body if isinstance(each, ast.FunctionDef)]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    ]


def test_the_observer_of_the_page_is_the_one_of_the_example():
    page = (ROOT / "docs/trackers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.S)
    example = (ROOT / "examples/trackers/mlflow_observer.py").read_text()
    [methods] = classes(code)
    assert len(methods) == 3
    assert [methods] == classes(example)


def test_the_readme_and_the_first_page_show_one_script():
    scripts = [
        re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
        for name in ("README.md", "docs/index.md")
    ]
    assert scripts[0] == scripts[1]
    assert len(scripts[0]) == 1


def test_the_readme_has_the_figures_of_why():
    rows = [
        re.findall(r"^\|.*", (ROOT / name).read_text(), re.M)[:5]
        for name in ("README.md", "docs/why.md")
    ]
    assert rows[0] == rows[1]
