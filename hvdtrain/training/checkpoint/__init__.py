"""Checkpoints of a training: what is in one, writing, and restoring."""
