"""The real data sets of the 8-, 14- and 20-task benchmarks: where they are, what their classes are called.

Class names and templates are those of CLIP's published prompt lists, so that zero-shot heads are comparable with the
literature's; the three data sets that are not in those lists have the 20-task benchmark's. Names that data sets give
as folder names are put into words.

Source: Radford et al. 2021 (prompts); Ilharco et al. 2023 (8 tasks); Wang et al. 2024, "Localizing Task Information
for Improved Model Merging and Compression" (14 and 20 tasks).
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
        hub_splits: the hub's split -> ours, where the hub's name for it says something else.
        hub_names: class names by label, where the hub's labels are bare numbers or truth values.
        renamed: names in the source -> CLIP's names, whatever the case and hyphens.
        numbered: CLIP's names by label, for sources that number their classes or write them with other case or hyphens.
    """

    name: str
    hub_id: str
    templates: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    hub_config: str | None = None
    hub_splits: Mapping[str, str] = field(default_factory=dict)
    hub_names: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()


def clip_class_names(task: RealTask, names: Sequence[str]) -> list[str]:
    """Return a source's class names in CLIP's words; names that are in CLIP's words already stay."""
    if task.numbered and len(names) == len(task.numbered) and all(name.isdecimal() for name in names):
        return [task.numbered[int(name)] for name in names]
    if task.name in ("MNIST", "SVHN"):
        return [re.sub(r"^(\d) - \w+$", r"\1", name) for name in names]
    clip_names = {plain(name): name for name in task.numbered}
    clip_names.update((plain(name), clip) for name, clip in task.renamed.items())
    # Only in SUN397 is a slash a folder; in Cars and GTSRB it belongs to the name ("Ram C/V Cargo Van").
    joints = r"[_/]+" if task.name == "SUN397" else r"_+"
    return [clip_names.get(plain(name)) or re.sub(joints, " ", name).strip() for name in names]


def plain(name: str) -> str:
    """Return a name without case, hyphens, underscores and spaces."""
    return re.sub(r"[-_ ]", "", name.lower())


NUMBER = ('a photo of the number: "{}".',)
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

_EIGHT = (
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
    RealTask("MNIST", "ylecun/mnist", NUMBER),
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
    RealTask("SVHN", "ufldl-stanford/svhn", NUMBER, hub_config="cropped_digits"),
)


_VIEWS = ("{}", "blurry {}", "black and white {}", "low contrast {}", "high contrast {}", "bad {}", "good {}")
# CLIP's 18 prompts for CIFAR: seven kinds of photo and two sizes, each with "a" and with "the".
CIFAR_TEMPLATES = tuple(
    template
    for article in ("a", "the")
    for template in (
        *(f"a {view.format('photo')} of {article} {{}}." for view in _VIEWS),
        *(f"a photo of {article} {size} {{}}." for size in ("small", "big")),
    )
)

_EMOTIONS = {
    "angry": "angry",
    "anger": "angry",
    "disgust": "disgusted",
    "fear": "fearful",
    "happiness": "happy",
    "sadness": "sad",
    "surprise": "surprised",
}
# By label; CLIP writes the cats with capitals and the dogs without.
_PETS = (
    "Abyssinian",
    "american bulldog",
    "american pit bull terrier",
    "basset hound",
    "beagle",
    "Bengal",
    "Birman",
    "Bombay",
    "boxer",
    "British Shorthair",
    "chihuahua",
    "Egyptian Mau",
    "english cocker spaniel",
    "english setter",
    "german shorthaired",
    "great pyrenees",
    "havanese",
    "japanese chin",
    "keeshond",
    "leonberger",
    "Maine Coon",
    "miniature pinscher",
    "newfoundland",
    "Persian",
    "pomeranian",
    "pug",
    "Ragdoll",
    "Russian Blue",
    "saint bernard",
    "samoyed",
    "scottish terrier",
    "shiba inu",
    "Siamese",
    "Sphynx",
    "staffordshire bull terrier",
    "wheaten terrier",
    "yorkshire terrier",
)
_TISSUES = ("lymph node", "lymph node containing metastatic tumor tissue")

_SIX_OF_FOURTEEN = (
    RealTask("CIFAR100", "tanganke/cifar100", CIFAR_TEMPLATES),
    RealTask(
        "FER2013",
        "clip-benchmark/wds_fer2013",
        (
            "a photo of a {} looking face.",
            "a photo of a face showing the emotion: {}.",
            "a photo of a face looking {}.",
            "a face that looks {}.",
            "they look {}.",
            "look at how {} they are.",
        ),
        # The hub's copy sorts the emotions, the original does not. CLIP has several names for some; the first is taken.
        hub_names=("angry", "disgusted", "fearful", "happy", "neutral", "sad", "surprised"),
        renamed=_EMOTIONS,
        numbered=("angry", "disgusted", "fearful", "happy", "sad", "surprised", "neutral"),
    ),
    RealTask(
        "Flowers102",
        "dpdl-benchmark/oxford_flowers102",
        ("a photo of a {}, a type of flower.",),
        aliases=("OxfordFlowers102", "Flowers"),
        renamed={
            "globe-flower": "globe flower",
            "pink-yellow dahlia?": "pink and yellow dahlia",
            "pink-yellow dahlia": "pink and yellow dahlia",
            "ball moss": "air plant",
        },
    ),
    RealTask(
        "OxfordIIITPet",
        "timm/oxford-iiit-pet",
        ("a photo of a {}, a type of pet.",),
        aliases=("OxfordPets", "OxfordPet"),
        numbered=_PETS,
    ),
    RealTask(
        "PCAM",
        "1aurent/PatchCamelyon",
        ("this is a photo of {}",),
        aliases=("PatchCamelyon",),
        hub_names=_TISSUES,
        numbered=_TISSUES,
    ),
    RealTask(
        "STL10",
        "tanganke/stl10",
        ("a photo of a {}.", "a photo of the {}."),
        numbered=("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"),
    ),
)


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_SYLLABLES = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
_AN_OR_THE = ("a photo of a {}.", "a photo of the {}.")

_SIX_OF_TWENTY = (
    # The benchmark's EMNIST are the digits; pictures lie on their side in every copy, as the original's do.
    RealTask(
        "EMNIST",
        "tanganke/emnist_mnist",
        ('a photo of the digit character: "{}".',),
        aliases=("EMNIST-digits",),
        hub_names=tuple("0123456789"),
    ),
    RealTask("CIFAR10", "tanganke/cifar10", CIFAR_TEMPLATES, numbered=_CIFAR10),
    # The hub calls the test images of Food101 `validation`.
    RealTask("Food101", "ethz/food101", ("a photo of {}, a type of food.",), hub_splits={"validation": "test"}),
    RealTask("FashionMNIST", "zalando-datasets/fashion_mnist", _AN_OR_THE, numbered=_CLOTHES),
    RealTask(
        "RenderedSST2",
        "nateraw/rendered-sst2",
        ("a {} review of a movie.",),
        aliases=("SST2",),
        numbered=("negative", "positive"),
    ),
    RealTask(
        "KMNIST",
        "tanganke/kmnist",
        ("a photo of the character {}.",),
        aliases=("Kuzushiji-MNIST",),
        hub_names=_SYLLABLES,
        renamed=dict(zip("おきすつなはまやれを", _SYLLABLES, strict=True)),
        numbered=_SYLLABLES,
    ),
)


_TASKS = (*_EIGHT, *_SIX_OF_FOURTEEN, *_SIX_OF_TWENTY)
REAL_TASKS: Mapping[str, RealTask] = {task.name: task for task in _TASKS}
_BY_NAME = {plain(name): task for task in _TASKS for name in (task.name, task.hub_id, *task.aliases)}


def find_real_task(name: str) -> RealTask | None:
    """Return the real task of a name, alias or hub id, whatever its case and hyphens; None for any other name."""
    return _BY_NAME.get(plain(name))


def get_real_task(name: str) -> RealTask:
    """Return the real task of a name, alias or hub id."""
    if (task := find_real_task(name)) is None:
        raise unknown_name("real data set", name, REAL_TASKS)
    return task
