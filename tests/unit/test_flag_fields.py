"""Flags that are defined by the fields of a dataclass."""

import dataclasses
from collections.abc import Sequence

import pytest
from absl import flags
from absl.testing import flagsaver

from hvdtrain.flag_fields import (
    FlagCheck,
    PathParser,
    define_flags,
    flag_field,
    read_flags,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cake:
    layers: int | None = flag_field(None, "Layers.", low=1, high=9)
    sugar: float = flag_field(0.5, "Sugar.", low=0)
    is_iced: bool = flag_field(False, "Icing.")
    shape: str = flag_field("round", "The shape.", choices=("round", "square"))
    fruits: Sequence[str] = flag_field(("plum", "fig"), "Fruits.")
    recipe: str | None = flag_field(None, "A file.", parser=PathParser())


define_flags(
    Cake,
    [
        FlagCheck(lambda fruits: len(fruits) < 3, "expected two or less"),
        FlagCheck(
            lambda layers, is_iced: not is_iced or layers == 1,
            "expected one layer with icing",
        ),
    ],
)


def parse(*arguments):
    with flagsaver.flagsaver():
        flags.FLAGS(["bake", *arguments])
        return read_flags(Cake)


def test_without_arguments_the_values_are_the_defaults():
    assert parse() == dataclasses.replace(Cake(), fruits=["plum", "fig"])


def test_a_value_has_the_type_of_its_field(monkeypatch):
    monkeypatch.setenv("HOME", "/home/baker")
    cake = parse(
        *("--layers=1", "--sugar=2", "--is_iced", "--shape=square"),
        *("--fruits=fig", "--recipe=~/cake"),
    )
    assert cake == Cake(
        layers=1,
        sugar=2.0,
        is_iced=True,
        shape="square",
        fruits=["fig"],
        recipe="/home/baker/cake",
    )
    assert isinstance(cake.sugar, float)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers=10"], r"--layers=10: .* \[1, 9\]"),
        (["--sugar=-1"], "--sugar=-1"),
        (["--shape=star"], r"--shape=star.*round\|square"),
        (["--fruits=fig,plum,pear"], "flag --fruits=.*: expected two or less"),
        (["--is_iced"], "flags --is_iced=True: expected one layer"),
        (["--recipe="], "--recipe.*expected a path; a variable may be unset"),
    ],
)
def test_a_wrong_value(arguments, message):
    with pytest.raises(flags.Error, match=message):
        parse(*arguments)


def test_flags_belong_to_the_module_that_defines_them_in_the_order_of_the_fields():
    flags_of_this_module = flags.FLAGS.flags_by_module_dict()[__name__]
    names = [field.name for field in dataclasses.fields(Cake)]
    assert [flag.name for flag in flags_of_this_module] == names
