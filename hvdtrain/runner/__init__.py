"""Jobs that a Python program starts: `hvdtrain.run`.

An engine places agents: processes on this machine, or tasks of Ray, Spark or Slurm.
Each agent starts ranks, as processes of their own, and Horovod's rendezvous connects
them.
"""
