"""Runs as their logs record them: a table of costs, and curves. Loads no TensorFlow.

Importing `plotting` loads matplotlib, an extra.
"""
