"""Shards of variables, their full values, and checks of layers and optimizers."""

# First: it raises one line where the libraries do not fit each other.
from hvdtrain import libraries
