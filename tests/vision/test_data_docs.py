"""docs/data.md names what the code offers."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergeflow.data.prepare import prepare_task
from mergeflow.modalities.vision.preparation import SOURCES, image_decoding, open_images
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_source_and_real_task_is_documented() -> None:
    assert all(f"| `{kind}:" in DOCS for kind in SOURCES)
    assert all(task.hub_id in DOCS and task.name in DOCS for task in REAL_TASKS.values())


def test_every_field_of_the_manifest_is_documented(tmp_path: Path) -> None:
    for row in range(20):
        (tmp_path / "pets" / f"{row % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), row, np.uint8)).save(tmp_path / "pets" / f"{row % 2}" / f"{row}.png")
    manifest = prepare_task(open_images("pets", f"folder:{tmp_path / 'pets'}"), tmp_path / "out", image_decoding(4))
    assert all(f"`{name}`" in DOCS for name in (*manifest, *manifest["splits"]["train"]))


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for row in range(10):
            pixels = np.full((40, 50, 3), 20 * row + label, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{row}.png")
    names: dict[str, object] = {}
    exec(DOCS.split("```python\n")[1].split("```")[0], names)
    assert names["train"].images.shape == (16, 32, 32, 3)  # type: ignore[attr-defined]
