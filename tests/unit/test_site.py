"""The site's tables and API pages have all names, and its search finds the pages."""

import collections
import importlib
import importlib.util
import inspect
import json
import math
import pathlib
import re
import subprocess
import sys

import pytest

from hvdtrain import environment, interruption, program
from hvdtrain.job.world import JobError, PreemptedError

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [*ROOT.glob("hvdtrain/**/*.py")]
PAGES = {
    "hvdtrain.keras": "keras.md",
    "hvdtrain.keras.callbacks": "keras.md",
    "hvdtrain.keras.elastic": "keras.md",
    "hvdtrain.training": "training.md",
    "hvdtrain.data": "data.md",
    "hvdtrain.parallel": "parallel.md",
    "hvdtrain.distribution": "distribution.md",
    "hvdtrain.job": "job.md",
}
# What people search for, and a page that has to be among the first three.
QUERIES = {
    "quickstart": "index.html",
    "getting started": "index.html",
    "tutorial": "training.html",
    "resume training": "training.html",
    "resume": "checkpoints.html",
    "early stopping": "checkpoints.html",
    "ctrl-c": "preemption.html",
    "sigterm": "preemption.html",
    "spot instances": "preemption.html",
    "hang": "troubleshooting.html",
    "out of memory": "troubleshooting.html",
    "gpu": "running.html",
    "learning rate": "moving/distribute.html",
    "migrate from horovod": "moving/index.html",
    "multi-node": "slurm.html",
    "docker": "containers.html",
    "jupyter": "python.html",
    "inference": "predicting.html",
    "throughput": "metrics.html",
    "fsdp": "parallelism/fully_sharded.html",
}


@pytest.fixture(scope="module")
def site_pages():
    path = ROOT / "scripts" / "site_pages.py"
    spec = importlib.util.spec_from_file_location("site_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def search_index(site_pages, tmp_path_factory):
    """Build the site, and return what its search loads."""
    settings = pytest.importorskip("mkdocs.config")
    commands = pytest.importorskip("mkdocs.commands.build")
    directory = tmp_path_factory.mktemp("site")
    path = str(ROOT / "mkdocs.yml")
    config = settings.load_config(path, site_dir=str(directory))
    # Listing flags starts a process for each program: share them with other tests.
    config.hooks["scripts/site_pages.py"].program_flags = site_pages.program_flags
    commands.build(config)
    return json.loads((directory / "search" / "search_index.json").read_text())


class Search:
    """The site's search, as the worker of the theme computes it with lunr.

    The words of a query match as prefixes. A field scores BM25 with k1=1.2 and b=0,
    times its boost. A section counts more if it begins a page, or has all words. This
    class does not remove stop words.
    """

    def __init__(self, index):
        self.separator = re.compile(index["config"]["separator"])
        self.boosts = {
            name: field["boost"] for name, field in index["config"]["fields"].items()
        }
        self.size = len(index["docs"])
        self.fields = {
            (section["location"], name): collections.Counter(self.words(section[name]))
            for section in index["docs"]
            for name in ("title", "text")
        }
        self.uses = collections.Counter(
            word for counts in self.fields.values() for word in counts
        )

    def words(self, text):
        text = re.sub("<[^>]*>", " ", text).lower()
        return [word for word in self.separator.split(text) if word]

    def rarity(self, word):
        uses = self.uses[word]
        return math.log(1 + abs((self.size - uses + 0.5) / (uses + 0.5)))

    def pages(self, query):
        """Return the pages that match, best first."""
        scores, found = collections.Counter(), collections.defaultdict(set)
        prefixes = self.words(query)
        for (location, name), counts in self.fields.items():
            for word, count in counts.items():
                for prefix in filter(word.startswith, prefixes):
                    score = self.rarity(word) * 2.2 * count / (1.2 + count)
                    scores[location] += self.boosts[name] * score
                    found[location].add(prefix)
        for location in scores:
            begins = "#" not in location
            share = len(found[location]) / len(set(prefixes))
            scores[location] *= 1 + (begins + share) ** 2
        ranked = [location.partition("#")[0] for location, _ in scores.most_common()]
        return [*dict.fromkeys(ranked)]


@pytest.mark.long
def test_the_search_finds_the_page_for_what_people_type(search_index):
    search = Search(search_index)
    found = {query: search.pages(query)[:3] for query in QUERIES}
    missed = {
        query: found[query]
        for query, page in QUERIES.items()
        if page not in found[query]
    }
    assert not missed


def test_the_reference_has_all_flags_variables_and_exit_codes(site_pages):
    text = site_pages.fill((DOCS / "reference.md").read_text())
    assert "<!--" not in text
    for name in site_pages.PROGRAMS:
        assert f"### `hvdtrain.{name}`" in text
    for flag in ("model_dir", "strategy", "output", "hosts", "wheels"):
        assert f"\n| `--{flag}` |" in text
    for name in {**environment.VARIABLES, **environment.HOROVOD_VARIABLES}:
        assert f"\n| `{name}` |" in text
    assert "\n| 75 |" in text
    assert "\n| `--model` | `mlp` | The network. One of `mlp`, `cnn`. |" in text
    assert "&lt;auto" not in text
    # A cell may not end at a | of its text.
    rows = re.findall(r"^\|.*", text, re.M)
    cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(cells) == {3, 4}


def test_a_marker_that_is_missing_is_an_error(site_pages):
    with pytest.raises(ValueError, match="0 blocks 'exit codes'"):
        site_pages.fill("# Flags\n")


def test_all_programs_are_in_the_reference(site_pages):
    programs = {
        path.stem
        for path in ROOT.glob("hvdtrain/*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    programs |= {path.parent.name for path in ROOT.glob("hvdtrain/*/__main__.py")}
    programs.remove("__main__")
    assert programs == set(site_pages.PROGRAMS)


def test_the_package_lists_its_programs(site_pages):
    command = [sys.executable, "-m", "hvdtrain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    for name in site_pages.PROGRAMS:
        assert f"\npython -m hvdtrain.{name} " in done.stdout, done


def test_all_variables_that_are_read_are_listed():
    read = set()
    for path in SOURCES:
        calls = r"environ(?:\.get\(|\.setdefault\(|\[)\"(HVDTRAIN_\w+)\""
        read |= set(re.findall(calls, path.read_text()))
    limits = re.findall(r"_number\(([A-Z_]+),", inspect.getsource(environment))
    named = {getattr(environment, name) for name in limits}
    read |= {name for name in named if name.startswith("HVDTRAIN_")}
    read.add(interruption.SIGNAL_FILE)
    assert read == set(environment.VARIABLES)


def test_exit_codes_of_errors_are_listed():
    for error in (JobError, PreemptedError):
        assert str(error.exit_code) in program.EXIT_CODES


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_has_an_entry(module):
    text = (DOCS / "api" / PAGES[module]).read_text()
    package = importlib.import_module(module)
    public = [
        name
        for name in getattr(package, "__all__", vars(package))
        if not name.startswith("_")
        and getattr(getattr(package, name), "__module__", "").startswith("hvdtrain.")
    ]
    missing = [name for name in public if not re.search(rf"\.{name}$", text, re.M)]
    assert not missing
    # Each where it is defined.
    for path, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", text, re.M):
        assert hasattr(importlib.import_module(path), name), f"{path}.{name}"


def test_each_mark_of_the_features_names_its_test(site_pages):
    page = (DOCS / "choosing.md").read_text()
    _, *rows = re.findall(r"^\| (.*) \|$", page.partition("## Features")[2], re.M)
    marks = {row.split(" | ")[0]: row.split(" | ")[1] for row in rows}
    assert len(marks) > 10
    for feature, mark in marks.items():
        if mark == "no":
            continue
        [(path, name)] = re.findall(r'^\[yes\]\((\S+) "(\w+)"\)$', mark)
        source = (DOCS / path).read_text()
        assert f"\ndef {name}(" in source, feature
        shown = site_pages.without_links_to_tests(mark)
        assert shown == f'<abbr title="{path[3:]}::{name}">yes</abbr>'


def test_every_page_but_the_home_starts_with_a_command_or_code():
    late = []
    for page in {*DOCS.glob("**/*.md")} - {DOCS / "index.md"}:
        lines = page.read_text().splitlines()
        first = next(line for line in lines[1:] if line)
        if not (lines[0].startswith("# ") and first.startswith("```")):
            late.append(page.name)
    assert not late


def test_the_home_shows_the_commands_before_tables_and_pictures():
    home = (DOCS / "index.md").read_text()
    first = re.search(r"^(```|\||!).*", home, re.M)
    assert first.group() == "```sh"
    assert first.start() < 600
