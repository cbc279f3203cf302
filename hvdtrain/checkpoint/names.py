"""Names of variables in two processes, whose objects Keras may have numbered.

Keras names an object after its class, with a number unless it is the first one of its
process: dense, dense_1, dense_2. A model that is made again may have dense_3 and
dense_4 for dense and dense_1. So these numbers are compared by their order, and all
names that a user has chosen as they are.
"""

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras.src.utils import naming

from hvdtrain.keras.variables import optimizers_inside

_NUMBER = r"(?:_([1-9]\d*))"
# The layer of a feature, in `keras.utils.FeatureSpace`.
_PREPROCESSOR = rf"((float_normalized){_NUMBER}?)_preprocessor"
# Classes whose objects are scopes in the paths of variables.
_SCOPES = (
    *(keras.layers.Layer, keras.metrics.Metric, keras.optimizers.Optimizer),
    keras.random.SeedGenerator,
)


class _Pattern(NamedTuple):
    """Matches a path in other processes; a group for the number after each word."""

    expression: re.Pattern[str]
    words: list[str]

    def numbers(self, path: str) -> list[int] | None:
        """Return the numbers in a path, 0 where there is none; None for no match."""
        match = self.expression.fullmatch(path)
        return match and [int(number or 0) for number in match.groups()]


class KerasNames:
    """Compares paths of variables of a model with those in a checkpoint.

    A name is automatic if it is made from the class of its object. An object that is
    not in the model, such as a `Sequential` whose layers the model has taken over, may
    be of any class of the process. Automatic names also occur within other names:
    `adam/dense_1_kernel_momentum`.
    """

    def __init__(self, model: keras.Model | None = None) -> None:
        self._model = model

    def difference(self, pairs: Iterable[tuple[str, str]]) -> str:
        """Return the first difference, or an empty text if the names are of one model.

        Numbers of a class may differ if they have the same order. A number that is
        equal in both does not count: an object that was loaded from a file, or is made
        once in a process, keeps its number while others get new ones.

        Args:
            pairs: the path of each variable in the checkpoint, and in the model.
        """
        pairs = [(before, now) for before, now in pairs if before != now]
        if not pairs:
            return ""
        make_patterns = self._patterns([now for _, now in pairs])
        texts: dict[str, dict[tuple[int, int], str]] = collections.defaultdict(dict)
        for before, now in pairs:
            text = f"{before} where the model has {now}"
            for pattern in make_patterns(now):
                if (numbers_before := pattern.numbers(before)) is not None:
                    break
            else:
                return text
            numbers = zip(pattern.numbers(now) or (), numbers_before, strict=True)
            for word, both in zip(pattern.words, numbers, strict=True):
                if both[0] != both[1]:
                    texts[word].setdefault(both, text)
        for by_numbers in texts.values():
            for first, second in itertools.pairwise(sorted(by_numbers)):
                if first[0] == second[0] or first[1] >= second[1]:
                    return f"{by_numbers[first]}, and {by_numbers[second]}"
        return ""

    def keys(
        self, now: Sequence[str], before: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Return keys of paths in the model, and keys of paths in a checkpoint.

        Two keys are equal if the paths differ only in numbers of automatic names.
        """
        patterns = list(map(self._patterns(now), now))
        keys = [first.expression.pattern for first, *_ in patterns]
        known = [
            (key, pattern.expression)
            for key, readings in zip(keys, patterns, strict=True)
            for pattern in readings
        ]
        keys_before = [
            next((key for key, expression in known if expression.fullmatch(path)), path)
            for path in before
        ]
        return keys, keys_before

    def _patterns(self, paths: Iterable[str]) -> Callable[[str], list[_Pattern]]:
        """Return a function that returns the patterns of one of these paths.

        Several, where a name of the user has the form of an automatic name: mlp_1 is
        a second block, or the first layer that a block with the name mlp has made.
        """
        automatic, given = self._automatic(paths)
        # The longest first: dense_block before dense.
        words = sorted({*automatic.values()}, key=len, reverse=True)
        expression = re.compile(
            rf"(?<![A-Za-z0-9])({'|'.join(words) or '(?!)'}){_NUMBER}?(?![A-Za-z0-9])",
            re.IGNORECASE,
        )
        compile_once = functools.cache(re.compile)

        def make_patterns(path: str) -> list[_Pattern]:
            # Text, words, and where each reading of the path has ended.
            readings: list[tuple[str, list[str], int]] = [("", [], 0)]
            for match in expression.finditer(path):
                ends = [match.end(0)] if match[0] in automatic else []
                if match[1] in automatic and (not ends or match[0] in given):
                    ends.append(match.end(1))
                if ends:
                    # Keras before 3.13 wrote SGD where later versions write sgd.
                    number = f"(?i:{match[1]}){_NUMBER}?"
                    readings = [
                        (
                            text + re.escape(path[end : match.start()]) + number,
                            [*words, match[1].lower()],
                            new_end,
                        )
                        for text, words, end in readings
                        for new_end in dict.fromkeys(ends)
                    ]
            return [
                _Pattern(compile_once(text + re.escape(path[end:])), words)
                for text, words, end in readings
            ]

        return make_patterns

    def _automatic(self, paths: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """Return the automatic names in the model and in these paths, and the user's.

        The values of the automatic ones are the names without numbers.
        """
        names: dict[str, str] = {}
        given: set[str] = set()
        classes = {naming.to_snake_case(cls.__name__) for cls in _subclasses(_SCOPES)}
        for each in self._objects():
            # A sharded layer returns the class of Keras from which it was made.
            word = naming.to_snake_case(each.__class__.__name__)
            expression = rf"(?:forward_|backward_)?({word}{_NUMBER}?)"
            if match := re.fullmatch(expression, each.name, re.IGNORECASE):
                names[match[1]] = word
            elif match := re.fullmatch(_PREPROCESSOR, each.name):
                names[match[1]] = match[2]
            else:
                given.add(each.name)
                # A layer that was made from a layer of another class has its name.
                word = re.sub(f"{_NUMBER}$", "", each.name)
                if word in classes:
                    names[each.name] = word
        for path in paths:
            *scopes, variable = path.split("/")
            words = {scope: classes for scope in scopes if scope not in given}
            for name, known in [*words.items(), (variable, {"variable"})]:
                word = name if name in known else re.sub(f"{_NUMBER}$", "", name)
                if word in known:
                    names.setdefault(name, word)
        return names, given

    def _objects(self) -> Iterator[Any]:
        if self._model is not None:
            yield from self._model._flatten_layers()
            yield from self._model.metrics
            yield self._model.optimizer
            yield from optimizers_inside(self._model.optimizer)


def _subclasses(classes: Iterable[type]) -> Iterator[type]:
    for cls in classes:
        yield cls
        yield from _subclasses(cls.__subclasses__())


def without_numbers(path: str) -> str:
    """Return a path without numbers, for objects whose classes are not known."""
    return re.sub(r"_\d+(?=_|/|$)", "", path).lower()
