"""Stands in for a matplotlib that is not installed.

Keras imports it where it is installed, which takes each rank half a second.
`importlib.util.find_spec` still finds this module: a program that draws needs a
`PYTHONPATH` without this directory.
"""

raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
