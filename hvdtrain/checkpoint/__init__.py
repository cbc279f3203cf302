"""Checkpoints of a training.

`header` lists the contents, and `storage` the files. To write one, all ranks call
`snapshot.capture`, a collective: the chief gathers the full values of sharded variables
and the per-rank state. A thread of the chief (`writing`) then writes the files while
training goes on; it calls no collective.

To restore one (`restoring.restore`, a collective), the chief reads the newest valid
checkpoint and assigns its own variables; header, shards and per-rank state are sent to
the other ranks. `BroadcastGlobalVariablesCallback` broadcasts replicated variables
before the first step, and the loop then assigns the per-rank state.
"""
