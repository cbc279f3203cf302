"""The flight recorder: what each rank does, for a job that hangs or has lost a rank.

A process beside each rank (`guard`) reads the rank's ring of records and its stacks,
and answers the calls of other guards and of `python -m hvdtrain.doctor --job`. It loads
neither TensorFlow nor any package outside the standard library.
"""
