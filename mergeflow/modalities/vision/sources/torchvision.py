"""Read the real data sets from the folders that torchvision's data sets use."""

from pathlib import Path

from mergeflow.data.address import default_root
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.sources.real_tasks import RealTask, clip_class_names, get_real_task
from mergeflow.modalities.vision.sources.torchvision_readers import READERS


def open_torchvision(task_name: str, place: str, seed: int, root: Path) -> RawTask:
    """Open one of the 20 real data sets from a local torchvision folder; nothing is downloaded.

    Official splits are used as they are: train, val and test of Flowers102, PCAM, RenderedSST2 and partition 1 of DTD;
    trainval and test of OxfordIIITPet; partition 1 of SUN397 and torchgeo's lists of RESISC45 where their files are
    present; nothing of EuroSAT; train and test of all others. What is left is carved.

    Args:
        place: `NAME[@ROOT]`, ROOT as given to torchvision, default `inputs/torchvision`. RESISC45, which torchvision
            lacks, is read from ROOT/NWPU-RESISC45/CLASS/*.jpg.
        root: what a relative ROOT starts from.

    Raises:
        MergeflowError: unknown name, or files missing, damaged or incomplete under ROOT.
    """
    name, _, own_root = place.partition("@")
    task = get_real_task(name)
    folder = root / (own_root or default_root("torchvision"))
    try:
        names, splits = READERS[task.name](folder)
    except MergeflowError:
        raise
    # torchvision raises RuntimeError, AssertionError, FileNotFoundError or a parser's error for the same thing.
    except Exception as error:
        raise _not_there(task, folder, error) from error
    return RawTask(
        name=task_name,
        class_names=clip_class_names(task, names),
        templates=task.templates,
        splits={split: rows.examples for split, rows in splits.items()},
        seed=seed,
        counts={split: len(rows.keys) for split, rows in splits.items()},
        keys={split: rows.list_keys for split, rows in splits.items()},
        keeps_conflicts=True,
    )


def _not_there(task: RealTask, folder: Path, error: Exception) -> MergeflowError:
    ways = {
        "StanfordCars": "torchvision can no longer download it: put the original archives under stanford_cars/",
        "RESISC45": "put the original archive's class folders under NWPU-RESISC45/",
        "FER2013": "put the competition's fer2013.csv or icml_face_data.csv under fer2013/",
    }
    fixed = "split='digits', " if task.name == "EMNIST" else ""
    fetch = f"python -c \"import torchvision; torchvision.datasets.{task.name}('{folder}', {fixed}download=True)\""
    if task.name in ("DTD", "GTSRB", "MNIST", "PCAM", "SVHN"):
        fetch += " (and the same for every other split)"
    return MergeflowError(
        f"{task.name} cannot be read from '{folder}' ({type(error).__name__}: {error}). "
        f"{ways.get(task.name, 'Download it with: ' + fetch)}, or use hf:{task.name}."
    )
