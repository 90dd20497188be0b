"""Make a stage's results the same bits under any driver and on any number of cores."""

import os
import sys

from threadpoolctl import threadpool_limits

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def compute_on_one_thread() -> None:
    """Let this thread, libraries that are loaded later and processes that start here compute on one thread each.

    A sum over two threads has other last bits than one over one: the float64 cosines of `vectors` did. It holds until
    the process ends, because stages that run side by side in one process need the same.
    """
    os.environ.update(dict.fromkeys(_VARIABLES, "1"))
    threadpool_limits(limits=1)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
