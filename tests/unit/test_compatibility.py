"""What does not fit is found in files, with what was found, expected and the remedy."""

import dataclasses
import importlib
import json
import pathlib
import re
import sysconfig
import warnings

import pytest

from hvdtrain import libraries
from hvdtrain.install import compatibility, record, supported
from hvdtrain.install.compatibility import MismatchError

REPLACE = "run python -m hvdtrain.install --replace"
EXTENSION = f"mpi_lib{sysconfig.get_config_var('EXT_SUFFIX')}"
FIRST = supported.text(supported.TENSORFLOW[0])
LAST = supported.text(supported.TENSORFLOW[-1])
RANGES = [
    ", ".join(map(supported.text, supported.TENSORFLOW)),
    *(" to ".join(map(supported.text, r)) for r in (supported.KERAS, supported.PYTHON)),
]


def add_package(site, package, *, version="1.0", distribution=None):
    """Write what pip leaves of a package into a directory; return the package's."""
    directory = site / package
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "__init__.py").touch()
    name = distribution or package
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return directory


def add_horovod(site, *, tensorflow=f"{LAST}.0", extension=EXTENSION):
    package = add_package(site, "horovod", version="0.28.1")
    (package / "metadata.json").write_text(json.dumps({"tensorflow": tensorflow}))
    (package / "tensorflow").mkdir()
    if extension:
        (package / "tensorflow" / extension).touch()
    return package


@pytest.fixture
def site(tmp_path):
    """A directory with packages that fit each other."""
    add_package(tmp_path, "tensorflow", version=f"{LAST}.0")
    add_package(tmp_path, "keras", version=f"{supported.text(supported.KERAS[1])}.2")
    add_horovod(tmp_path)
    return tmp_path


def read(*sites):
    return compatibility.read_installed([str(site) for site in sites])


def test_libraries_that_fit_have_no_mismatch(site):
    installed = read(site)
    assert compatibility.before_loading(installed, {"TF_USE_LEGACY_KERAS": "0"}) is None
    assert compatibility.check_tensorflow(f"{FIRST}.0", installed) is None
    # Another patch release, as TensorFlow has one ABI for them.
    assert compatibility.check_horovod(installed, f"{LAST}.7+site") is None
    keras = installed.keras
    assert compatibility.doubts(installed, tensorflow=f"{LAST}.1", keras=keras) == []


def test_missing_libraries_are_named_with_the_command_that_installs_them(tmp_path):
    mismatch = compatibility.before_loading(read(tmp_path), {})
    expected = "TensorFlow is not installed: run pip install 'hvdtrain[cpu]'."
    assert str(mismatch) == expected
    add_package(tmp_path, "tensorflow")
    # A clone of Horovod in the working directory is no package.
    (tmp_path / "horovod").mkdir()
    mismatch = compatibility.before_loading(read(tmp_path), {})
    expected = "Horovod is not installed: run python -m hvdtrain.install."
    assert str(mismatch) == expected


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_keras_2_by_a_variable_is_a_mismatch(site, value):
    mismatch = compatibility.before_loading(read(site), {"TF_USE_LEGACY_KERAS": value})
    assert str(mismatch) == (
        f"Received TF_USE_LEGACY_KERAS={value}, by which tf.keras is Keras 2; expected "
        "Keras 3: unset TF_USE_LEGACY_KERAS."
    )


@pytest.mark.parametrize(
    ("environ", "file", "expected"),
    [
        (
            *({"KERAS_BACKEND": "torch"}, "{}"),
            "Received KERAS_BACKEND=torch; expected tensorflow: unset KERAS_BACKEND.",
        ),
        (
            *({}, '{"backend": "jax"}'),
            "Received backend in {file}=jax; expected tensorflow: correct it there, or "
            "set KERAS_BACKEND=tensorflow.",
        ),
        ({"KERAS_BACKEND": "tensorflow"}, '{"backend": "jax"}', "None"),
        ({}, '{"backend": "tensorflow"}', "None"),
        ({}, "not JSON", "None"),
    ],
)
def test_another_backend_of_keras_is_a_mismatch(
    site, tmp_path, environ, file, expected
):
    path = tmp_path / "keras.json"
    path.write_text(file)
    environ = environ | {"KERAS_HOME": str(tmp_path)}
    mismatch = compatibility.before_loading(read(site), environ)
    assert str(mismatch) == expected.replace("{file}", str(path))


def test_versions_that_are_too_old_are_mismatchs(site):
    declared = pathlib.Path(__file__).parents[2].joinpath("setup.cfg").read_text()
    [wanted] = re.findall(r"^ *(keras>=.*)$", declared, re.M)
    installed = dataclasses.replace(read(site), keras="3.5.0")
    assert str(compatibility.before_loading(installed, {})) == (
        f"Received Keras 3.5.0; expected {RANGES[1]}: run pip install '{wanted}'."
    )
    installed = dataclasses.replace(installed, python=(3, 9))
    assert str(compatibility.before_loading(installed, {})) == (
        f"Received Python 3.9; expected {RANGES[2]}: use one of these."
    )


def test_the_tensorflow_that_is_there_is_upgraded_and_not_a_second_one_installed(site):
    add_package(site, "tensorflow", version="2.9.1", distribution="tensorflow-cpu")
    (site / f"tensorflow-{LAST}.0.dist-info/METADATA").unlink()
    (site / f"tensorflow-{LAST}.0.dist-info").rmdir()
    major, minor = supported.TENSORFLOW[-1]
    assert str(compatibility.check_tensorflow("2.9.1", read(site))) == (
        f"Received TensorFlow 2.9.1; expected {RANGES[0]}: run pip install "
        f"'tensorflow-cpu>={FIRST},<{major}.{minor + 1}', then python -m "
        "hvdtrain.install."
    )


def test_newer_versions_than_those_tested_are_doubts(site):
    installed = dataclasses.replace(read(site), python=(3, 99))
    found = compatibility.doubts(installed, tensorflow="2.99.0", keras="3.99.0")
    assert list(map(str, found)) == [
        f"Received {topic} {version}; expected {expected}: "
        "hvdtrain was not tested with it."
        for topic, version, expected in zip(
            ("TensorFlow", "Keras", "Python"),
            ("2.99.0", "3.99.0", "3.99"),
            RANGES,
            strict=True,
        )
    ]


def test_a_horovod_for_another_tensorflow_is_a_mismatch(tmp_path):
    package = add_horovod(tmp_path, tensorflow="2.20.0")
    message = (
        f"Horovod in {package} was built for TensorFlow 2.20.0, and 2.99.1 is "
        "installed: run python -m hvdtrain.install --replace."
    )
    assert str(compatibility.check_horovod(read(tmp_path), "2.99.1")) == message
    # The record of a build of ours comes before Horovod's own file.
    record.write(package, record.BuildRecord(version="0.28.1", tensorflow="2.98.0"))
    mismatch = compatibility.check_horovod(read(tmp_path), "2.99.1")
    assert "was built for TensorFlow 2.98.0, and 2.99.1" in str(mismatch)


@pytest.mark.parametrize(
    ("extension", "words"),
    [
        (None, "was built without TensorFlow"),
        (
            "mpi_lib.cpython-39-x86_64-linux-gnu.so",
            "was built for another Python: it has "
            f"mpi_lib.cpython-39-x86_64-linux-gnu.so and no {EXTENSION}",
        ),
    ],
)
def test_a_horovod_without_an_extension_that_loads_is_a_mismatch(
    tmp_path, extension, words
):
    package = add_horovod(tmp_path, extension=extension)
    mismatch = compatibility.check_horovod(read(tmp_path), f"{LAST}.0")
    expected = f"Horovod in {package} {words}: {REPLACE}."
    assert str(mismatch) == expected


def test_an_older_horovod_without_metadata_is_left_to_its_import(tmp_path):
    package = add_horovod(tmp_path)
    (package / "metadata.json").unlink()
    assert compatibility.check_horovod(read(tmp_path), "2.99.0") is None


def test_two_horovods_are_both_named(tmp_path):
    first, second = (add_horovod(tmp_path / name) for name in ("first", "second"))
    installed = read(tmp_path / "first", tmp_path / "second", tmp_path / "first")
    [doubt] = compatibility.doubts(installed, tensorflow=f"{LAST}.0", keras="3.12.0")
    assert str(doubt) == (
        f"Horovod is in {first}, which is used, and in {second}: "
        "uninstall one of them, or correct PYTHONPATH."
    )
    mismatch = compatibility.check_horovod(installed, "2.99.0")
    assert f"Horovod in {first} (another one is in {second}) was" in str(mismatch)


def test_one_horovod_by_two_paths_is_one(tmp_path):
    add_horovod(tmp_path / "lib")
    (tmp_path / "lib64").symlink_to("lib")
    assert len(read(tmp_path / "lib", tmp_path / "lib64").horovods) == 1


MISSING = "libmpi.so.40: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("text", "mpi", "words"),
    [
        (
            f"/x/{MISSING}",
            "Open MPI 4.1.4",
            "needs libmpi.so.40, which is not found: load the MPI module of your "
            "cluster (Open MPI 4.1.4), or run python -m hvdtrain.install --replace.",
        ),
        (
            MISSING,
            "",
            "needs libmpi.so.40, which is not found: load the MPI module of your "
            "cluster, or run python -m hvdtrain.install --replace.",
        ),
        (
            MISSING.replace("mpi.so.40", "nccl.so.2"),
            "",
            f"needs libnccl.so.2, which is not found: {REPLACE}.",
        ),
        (
            "/x/mpi_lib.so: undefined symbol: _ZN10tensorflow8OpKernel5nameEv",
            "",
            "does not fit this TensorFlow (undefined symbol: "
            f"_ZN10tensorflow8OpKernel5nameEv): {REPLACE}.",
        ),
    ],
)
def test_a_horovod_that_does_not_load_is_explained(tmp_path, text, mpi, words):
    package = add_horovod(tmp_path)
    if mpi:
        build = record.BuildRecord(version="0.28.1", tensorflow=f"{LAST}.0", mpi=mpi)
        record.write(package, build)
    error = ImportError("Framework tensorflow installed with version 2.21.0 but found")
    # As Horovod raises it for another patch release.
    error.__cause__ = OSError(text)
    mismatch = compatibility.explain(error, read(tmp_path))
    assert str(mismatch) == f"Horovod in {package} {words}"


def test_other_errors_of_an_import_stay_as_they_are(site):
    assert (
        compatibility.explain(ImportError("No module named 'yaml'"), read(site)) is None
    )


def test_a_horovod_without_the_patch_of_stall_limits_is_a_doubt(tmp_path):
    package = add_horovod(tmp_path)
    doubt = compatibility.check_stall_limits(read(tmp_path))
    assert str(doubt) == (
        f"Horovod in {package} lacks hvdtrain's patches: under Gloo a collective that "
        "one rank does not call blocks the others for ever: "
        "run python -m hvdtrain.install --replace, or use horovodrun --mpi."
    )
    patches = pathlib.Path(compatibility.__file__).with_name("patches").glob("*.patch")
    sources = {patch.name: "digest" for patch in patches}
    build = record.BuildRecord("0.28.1", tensorflow=f"{LAST}.0", sources=sources)
    record.write(package, build)
    assert compatibility.check_stall_limits(read(tmp_path)) is None


def test_the_import_of_libraries_that_do_not_fit_raises_the_one_line(monkeypatch, site):
    installed = dataclasses.replace(read(site), keras="3.5.0")
    monkeypatch.setattr(compatibility, "read_installed", lambda: installed)
    with pytest.raises(MismatchError, match=r"^Received Keras 3\.5\.0; .*'\.$"):
        importlib.reload(libraries)


def test_a_horovod_that_does_not_load_raises_the_one_line(monkeypatch, site):
    load = importlib.import_module

    def import_module(name):
        if name == "horovod.tensorflow":
            raise ImportError(MISSING)
        return load(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(MismatchError, match=r"needs libmpi\.so\.40.*replace\.$"):
        importlib.reload(libraries)


def test_doubts_are_warned_of_once(monkeypatch, site):
    installed = read(site, add_horovod(site / "other").parent)
    monkeypatch.setattr(compatibility, "read_installed", lambda: installed)
    libraries.warn_of_doubts.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            libraries.warn_of_doubts(is_stall_limit_needed=True)
    assert ["which is used" in str(w.message) for w in caught] == [True, False]
    assert "lacks hvdtrain's patches" in str(caught[1].message)
