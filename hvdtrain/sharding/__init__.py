"""Shards of variables, their full values, and checks of layers and optimizers."""
