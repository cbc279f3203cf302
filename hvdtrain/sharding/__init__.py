"""Sharded variables: the shards, their full values, and checks of layers on shards."""
