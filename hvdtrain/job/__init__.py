"""One job of N processes. Importing this package loads no TensorFlow.

`agreement`, which needs collectives and thereby TensorFlow, is imported by its name.
"""

from hvdtrain.job.start import start
from hvdtrain.job.world import JobError, World
