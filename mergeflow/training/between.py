"""Make the merge between rounds of iterative training. It is separate from the settings, which import no method."""

from mergeflow.errors import MergeflowError
from mergeflow.merging.catalog import MethodCall, configure
from mergeflow.training.settings import IterativeSettings


def merge_between(settings: IterativeSettings) -> MethodCall:
    """Return the method that merges the tasks' models between two rounds, with its arguments."""
    call = configure(settings.merge, settings.args)
    if call.method.data:
        raise MergeflowError(
            f"method '{settings.merge}' needs statistics of data ({', '.join(call.method.data)}), which are not taken "
            "between rounds: choose one that needs none, such as 'average' or 'task_arithmetic'."
        )
    return call
