"""Names of variables that are the same in all phases of a verification."""

import collections
from collections.abc import Iterable
from typing import Any


class VariableNames:
    """Names variables by their path, and by the order in which they are made.

    Variables of one script may have the same path, such as those of a model and of its
    `keras.models.clone_model`. The second one is "path #2".
    """

    def __init__(self) -> None:
        # By identity: variables are not hashable. In the order of creation.
        self._names: dict[int, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, variable: Any) -> None:
        """Name a variable that has just been made."""
        # Of a variable that is gone, and whose memory this one has.
        self._names.pop(id(variable), None)
        path = _path(variable)
        self._counts[path] += 1
        number = self._counts[path]
        self._names[id(variable)] = path if number == 1 else f"{path} #{number}"

    def by_name(self, variables: Iterable[Any]) -> dict[str, Any]:
        """Return distinct variables by their names."""
        return {
            self._names.get(id(variable), _path(variable)): variable
            for variable in variables
        }

    def place(self, variables: Iterable[Any]) -> int:
        """Return the place of the first of some variables in the order of creation."""
        places = {identity: place for place, identity in enumerate(self._names)}
        return min((places.get(id(each), -1) for each in variables), default=-1)


def _path(variable: Any) -> str:
    # A variable of TensorFlow has a name only.
    return variable.path if hasattr(variable, "path") else variable.name
