"""Horovod and the native operations in the Python environment of the user.

Apart from `__main__`, which parses flags, the package imports no module of hvdtrain
outside of itself, and neither TensorFlow nor Horovod, except in `proof`, which runs in
processes of its own.
"""
