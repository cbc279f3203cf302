"""Stands in for a matplotlib that is not installed.

Keras imports it where it is installed, which takes each rank half a second.
"""

raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
