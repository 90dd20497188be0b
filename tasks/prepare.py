"""Stage `prepare`: one task's examples, read or drawn, split, and decoded once."""

import shutil
import sys

from mergeflow import layout
from mergeflow.data import SPLITS
from mergeflow.data.address import open_source
from mergeflow.data.arrays import MANIFEST
from mergeflow.data.prepare import prepare_task
from mergeflow.modalities.preparing import find_preparation
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write `outputs/data/<split>/<task>` for each split, and the manifest.

    The splits lie in folders of their own so that the graph shows who reads which: test is read by `evaluate` alone.
    """

    def report(split: str, done: int, total: int | None) -> None:
        io.report(split, done, total or done)

    preparation = find_preparation(io.section("model.modality"))
    source, seed = io.section(f"tasks.{io.item}"), io.params.seed
    raw = open_source(io.item, source, preparation.sources, preparation.transforms, seed, root=io.root)
    work = io.scratch / "prepared"
    shutil.rmtree(work, ignore_errors=True)
    decoding = preparation.decoding(io.section("data"), io.root)
    for warning in prepare_task(raw, work, decoding, seed, report)["warnings"]:
        print(f"warning: task '{io.item}': {warning}", file=sys.stderr)
    for split in SPLITS:
        folder = io.out(layout.split(split, io.item))
        folder.mkdir()
        for path in work.glob(f"{split}.*"):
            path.rename(folder / path.name)
        shutil.copy(work / MANIFEST, folder / MANIFEST)
    manifests = io.out(layout.manifest_folder(io.item))
    manifests.mkdir()
    (work / MANIFEST).rename(manifests / MANIFEST)
