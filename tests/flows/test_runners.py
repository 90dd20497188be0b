"""Task runners that are not there."""

import re
import sys

import pytest

from flows.runners import task_runner
from mergeflow.errors import MergeflowError


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_a_runner_without_its_package_is_refused_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"prefect_{name}", None)
    advice = f"run `pip install '/path/to/mergeflow[{name}]'`"
    line = f"run.runner is '{name}', which needs the package prefect-{name}: {advice}"
    with pytest.raises(MergeflowError, match=re.escape(line)):
        task_runner(name, 2)
