"""The eight tasks of the standard model-merging benchmark: where they are, what their classes are called.

Class names and templates are those of CLIP's published prompt lists for the eight data sets, so that zero-shot heads
are comparable with the literature's. Names that data sets give as folder names are put into words.

Source: Radford et al. 2021 (prompts); Ilharco et al. 2023, "Editing models with task arithmetic" (the eight tasks).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mergeflow.errors import unknown_name


@dataclass(frozen=True)
class RealTask:
    """One real data set.

    Args:
        name: its usual name, which is also that of the torchvision class where there is one.
        hub_id: data set of the Hugging Face hub that holds images and labels in Parquet.
        templates: CLIP's prompts.
        aliases: other names people write.
        hub_config: configuration of the hub's data set, where it has several.
        renamed: names in the source -> CLIP's names; used when every name of the source is a key.
        numbered: CLIP's names by label, for sources that number their classes.
    """

    name: str
    hub_id: str
    templates: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    hub_config: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()


def find_real_task(name: str) -> RealTask | None:
    """Return the real task of a name, alias or hub id, whatever its case and hyphens; None for any other name.

    Example:
        >>> find_real_task("stanford-cars").name, find_real_task("tanganke/dtd").name, find_real_task("pets")
        ('StanfordCars', 'DTD', None)
    """
    return _BY_NAME.get(_plain(name))


def get_real_task(name: str) -> RealTask:
    """Return the real task of a name, alias or hub id.

    Raises:
        MergeflowError: an unknown name; the message has the nearest known one.
    """
    task = find_real_task(name)
    if task is None:
        raise unknown_name("real data set", name, REAL_TASKS)
    return task


def clip_class_names(task: RealTask, names: Sequence[str]) -> list[str]:
    """Return a source's class names in CLIP's words; names that are in CLIP's words already stay.

    Example:
        >>> clip_class_names(REAL_TASKS["RESISC45"], ["mobile_home_park"])
        ['mobile home park']
        >>> clip_class_names(REAL_TASKS["MNIST"], ["0 - zero", "1 - one"])
        ['0', '1']
        >>> clip_class_names(REAL_TASKS["SUN397"], ["church/outdoor"])
        ['church outdoor']
    """
    if task.numbered and len(names) == len(task.numbered) and all(name.isdecimal() for name in names):
        return [task.numbered[int(name)] for name in names]
    if task.renamed and all(name in task.renamed for name in names):
        return [task.renamed[name] for name in names]
    if task.name in ("MNIST", "SVHN"):
        return [re.sub(r"^(\d) - \w+$", r"\1", name) for name in names]
    # Only in SUN397 is a slash a folder; in Cars and GTSRB it belongs to the name ("Ram C/V Cargo Van").
    joints = r"[_/]+" if task.name == "SUN397" else r"_+"
    return [re.sub(joints, " ", name).strip() for name in names]


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


_NUMBER = ('a photo of the number: "{}".',)
_CAR_ADJECTIVES = ("dirty", "clean", "new", "old")
_SPEEDS = "red and white circle {} kph speed limit"
_WARNING = "red and white triangle with {} warning"
_MANDATORY = "blue circle with white {} mandatory"
_ENDED = "white circle with gray strike bar indicating no passing for {} has ended"
# "horizonal" and "bicyle" are CLIP's own spelling: a corrected prompt would be another prompt.
_GTSRB_NAMES = (
    *(_SPEEDS.format(speed) for speed in (20, 30, 50, 60, 70, 80)),
    "end / de-restriction of 80 kph speed limit",
    *(_SPEEDS.format(speed) for speed in (100, 120)),
    "red and white circle red car and black car no passing",
    "red and white circle red truck and black car no passing",
    "red and white triangle road intersection warning",
    "white and yellow diamond priority road",
    "red and white upside down triangle yield right-of-way",
    "stop",
    "empty red and white circle",
    "red and white circle no truck entry",
    "red circle with white horizonal stripe no entry",
    _WARNING.format("exclamation mark"),
    _WARNING.format("black left curve approaching"),
    _WARNING.format("black right curve approaching"),
    _WARNING.format("black double curve approaching"),
    "red and white triangle rough / bumpy road warning",
    "red and white triangle car skidding / slipping warning",
    _WARNING.format("merging / narrow lanes"),
    _WARNING.format("person digging / construction / road work"),
    _WARNING.format("traffic light approaching"),
    _WARNING.format("person walking"),
    _WARNING.format("child and person walking"),
    _WARNING.format("bicyle"),
    _WARNING.format("snowflake / ice"),
    _WARNING.format("deer"),
    "white circle with gray strike bar no speed limit",
    _MANDATORY.format("right turn arrow"),
    _MANDATORY.format("left turn arrow"),
    _MANDATORY.format("forward arrow"),
    _MANDATORY.format("forward or right turn arrow"),
    _MANDATORY.format("forward or left turn arrow"),
    _MANDATORY.format("keep right arrow"),
    _MANDATORY.format("keep left arrow"),
    "blue circle with white arrows indicating a traffic circle",
    _ENDED.format("cars"),
    _ENDED.format("trucks"),
)

_EUROSAT_NAMES = {
    "AnnualCrop": "annual crop land",
    "Forest": "forest",
    "HerbaceousVegetation": "brushland or shrubland",
    "Highway": "highway or road",
    "Industrial": "industrial buildings or commercial buildings",
    "Pasture": "pasture land",
    "PermanentCrop": "permanent crop land",
    "Residential": "residential buildings or homes or apartments",
    "River": "river",
    "SeaLake": "lake or sea",
}

_TASKS = (
    RealTask(
        "StanfordCars",
        "tanganke/stanford_cars",
        (
            "a photo of a {}.",
            "a photo of the {}.",
            "a photo of my {}.",
            "i love my {}!",
            *(f"a photo of my {adjective} {{}}." for adjective in _CAR_ADJECTIVES),
        ),
        aliases=("Cars",),
    ),
    RealTask(
        "DTD",
        "tanganke/dtd",
        tuple(f"a photo of {a} {{}} {n}." for a in ("a", "the") for n in ("texture", "pattern", "thing", "object")),
    ),
    RealTask(
        "EuroSAT",
        "tanganke/eurosat",
        tuple(f"a centered satellite photo of {article}{{}}." for article in ("", "a ", "the ")),
        renamed=_EUROSAT_NAMES,
    ),
    RealTask(
        "GTSRB",
        "tanganke/gtsrb",
        tuple(f'a {view} photo of a "{{}}" traffic sign.' for view in ("zoomed in", "centered", "close up")),
        numbered=_GTSRB_NAMES,
    ),
    RealTask("MNIST", "ylecun/mnist", _NUMBER),
    RealTask(
        "RESISC45",
        "tanganke/resisc45",
        tuple(
            f"{view} of {article}{{}}."
            for article in ("", "a ", "the ")
            for view in (f"{kind} {noun}" for noun in ("imagery", "photo", "view") for kind in ("satellite", "aerial"))
        ),
        aliases=("NWPU-RESISC45",),
    ),
    RealTask("SUN397", "tanganke/sun397", ("a photo of a {}.", "a photo of the {}.")),
    RealTask("SVHN", "ufldl-stanford/svhn", _NUMBER, hub_config="cropped_digits"),
)
REAL_TASKS: Mapping[str, RealTask] = {task.name: task for task in _TASKS}
_BY_NAME = {_plain(name): task for task in _TASKS for name in (task.name, task.hub_id, *task.aliases)}
