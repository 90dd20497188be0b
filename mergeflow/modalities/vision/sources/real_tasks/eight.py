"""The eight tasks of the standard model-merging benchmark.

Source: Radford et al. 2021 (prompts); Ilharco et al. 2023, "Editing models with task arithmetic" (the eight tasks).
"""

from mergeflow.modalities.vision.sources.real_tasks.task import RealTask

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

EIGHT = (
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
