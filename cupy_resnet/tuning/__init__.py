"""Times the kernels that could compute a network's convolutions on this GPU, and remembers which was fastest.

What is found here `cupy_resnet.conv2d.choose` follows from then on: in this process, and, from a file in the cache
folder, in later ones. So it is with several convolutions that may be one kernel: with a shortcut, or in a row.

One module per step: `workloads` lists what there is to decide, `entrants` the candidates that the cost model leaves,
`contest` says which of them are timed how often, `operands` makes the arrays, `bench` times on the GPU, `rounds` goes
through a network, `remembering` writes tables. Then `in_network` sees which of the fastest alone are so in the network
as well: `passes` times whole forward passes on the GPU, `duels` compares them. `first_call` does all of it at the first
call of a model.

Importing this package imports no CuPy; only a `GpuBench` and `GpuPasses` need a GPU.
"""

from .bench import Bench, GpuBench, Race
from .duels import CapturedPass, Change, Passes
from .entrants import Candidate, candidates
from .first_call import Tuner
from .in_network import InNetwork, tune_in_network
from .passes import GpuPasses, bind_at_random
from .remembering import remember, write_table
from .rounds import Report, Result, tune
from .workloads import Workload, network_problems, possible_precision

__all__ = [
    "Bench",
    "Candidate",
    "CapturedPass",
    "Change",
    "GpuBench",
    "GpuPasses",
    "InNetwork",
    "Passes",
    "Race",
    "Report",
    "Result",
    "Tuner",
    "Workload",
    "bind_at_random",
    "candidates",
    "network_problems",
    "possible_precision",
    "remember",
    "tune",
    "tune_in_network",
    "write_table",
]
