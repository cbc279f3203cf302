"""Files about the project: they have the keys that their readers expect."""

import configparser
import pathlib
import re

import yaml

import hvdtrain

ROOT = pathlib.Path(__file__).parents[2]
FORMS = ROOT / ".github/ISSUE_TEMPLATE"


def test_the_citation_is_valid_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    required = {"cff-version", "message", "title", "authors"}
    assert required <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert all({"name"} == author.keys() for author in citation["authors"])
    assert citation["type"] == "software"
    assert citation["version"] == hvdtrain.__version__
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert citation["license"] == setup["metadata"]["license"]


def test_the_forms_of_issues_are_valid():
    kinds = {"checkboxes", "dropdown", "input", "markdown", "textarea"}
    for path in FORMS.glob("*_*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        ids = [each["id"] for each in form["body"]]
        assert len({*ids}) == len(ids)
        for each in form["body"]:
            assert each["type"] in kinds
            assert each["attributes"]["label"]


def test_a_bug_report_asks_for_what_the_doctor_prints():
    form = yaml.safe_load((FORMS / "bug_report.yml").read_text())
    required = {
        each["id"]: each["attributes"].get("description", "")
        for each in form["body"]
        if each.get("validations", {}).get("required")
    }
    assert {"doctor", "command", "launcher"} <= required.keys()
    assert "python -m hvdtrain.doctor" in required["doctor"]


def test_the_changelog_has_the_form_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.M)
    assert versions[0] == "[Unreleased]" or hvdtrain.__version__ in versions[0]
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.*)$", text, re.M)} <= kinds


def test_the_source_archive_has_them():
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    assert {"CHANGELOG.md", "CITATION.cff", "SECURITY.md", "examples"} <= {*manifest}
    # Tests import it.
    assert "benchmarks" in manifest
