"""What `python -m hvdtrain.verify` does: run a script twice, and compare the steps.

The phases, each a job of its own (`phases`), whose ranks run the script in `worker`:

- "ranks": the script as it is. `capture` writes the batches that it reads, and the
  state of the training after each step, to files (`trajectory`).
- "reference": as many ranks, each of which trains on the concatenated batches of all
  ranks and reduces no gradient: rank 0 is one process with the N-times batch.
- "alone": one process without a launcher, for its learning rates, and for its first
  gradients with the same batch.

`comparison` finds the first step and variable that differ, and `causes` the reason.
"""
