"""Horovod and the native operations in the Python environment of the user.

`python -m hvdtrain.install` calls this package. It imports neither TensorFlow nor
Horovod, and no module of hvdtrain outside of itself.
"""
