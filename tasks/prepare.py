"""Stage `prepare`: one task's images, read or drawn, split, and decoded once."""

import shutil

from mergeflow import layout
from mergeflow.modalities.vision.data import SPLITS, Progress, open_source, prepare_task
from mergeflow.modalities.vision.data.store import MANIFEST
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write `outputs/data/<split>/<task>` for each split, and the manifest.

    The splits lie in folders of their own so that the graph shows who reads which: test is read by `evaluate` alone.
    """
    raw = open_source(io.item, io.section(f"tasks.{io.item}"), io.params.seed, root=io.root)
    work = io.scratch / "prepared"
    shutil.rmtree(work, ignore_errors=True)
    prepare_task(raw, work, io.section("data").image_size, io.params.seed, _progress(io))
    for split in SPLITS:
        folder = io.out(layout.split(split, io.item))
        folder.mkdir()
        for path in work.glob(f"{split}.*"):
            path.rename(folder / path.name)
        shutil.copy(work / MANIFEST, folder / MANIFEST)
    manifests = io.out(layout.manifest_folder(io.item))
    manifests.mkdir()
    (work / MANIFEST).rename(manifests / MANIFEST)


def _progress(io: StageIO) -> Progress:
    def report(split: str, done: int, total: int | None) -> None:
        io.report(split, done, total or done)

    return report
