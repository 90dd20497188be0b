"""Models and examples without content as a command describes them: by an architecture and prepared tasks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mergeflow.data import load_manifest
from mergeflow.memory.needs import Need, blank_model, work_need
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.recorded import is_recorded, read_record
from mergeflow.modality import Examples, Model


@dataclass(frozen=True)
class Described:
    """What work is foretold from.

    Attributes:
        build: the model, with any weights.
        blank: the model and a number of examples to so many without content.
    """

    build: Callable[[], Model]
    blank: Callable[[Model, int], Examples]

    def need(self, work: Callable[[Model, Any], Any], rows: int, sums: float = 0) -> Need:
        """Return what work on a CUDA device takes.

        Args:
            work: what is done with the model and the examples.
            rows: how many examples it is given.
            sums: as of `work_need`.
        """
        plain = blank_model(self.build)  # heads fit its features; the other one loses its values
        return work_need(blank_model(self.build), lambda count: self.blank(plain, count), work, rows=rows, sums=sums)


def described(architecture: str, folders: Iterable[str | Path] = (), classes: int = 1) -> Described | None:
    """Return what the inputs of a command describe; None for a modality without blank examples.

    Args:
        architecture: of an image encoder; or the file of a base that says itself what it is.
        folders: of prepared tasks.
        classes: of a task at least, where some are not prepared yet.
    """
    manifests = [load_manifest(folder) for folder in folders]
    stored = {name: value for one in manifests for name, value in one["decoding"].items()}
    most = max([classes, *(len(one["class_names"]) for one in manifests)])
    if is_recorded(architecture):
        modality, section, record = read_record(architecture)
        make = modality.blank
        if make is None:
            return None
        return Described(
            lambda: modality.build(section, record),
            lambda model, count: make(model, section, SimpleNamespace(**stored), count, most),
        )
    from mergeflow.modalities.vision.models import image_model, load_clip

    images = MODALITIES.get("vision").blank
    assert images is not None

    def pictured(model: Any, count: int) -> Examples:
        data = SimpleNamespace(image_size=model.module.visual.image_size[0])
        return images(model, None, data, count, most)

    return Described(lambda: image_model(load_clip(architecture)), pictured)
