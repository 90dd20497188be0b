"""The six tasks that extend the eight to the 14-task benchmark.

Source: Radford et al. 2021 (prompts); Wang et al. 2024, "Localizing Task Information for Improved Model Merging and
Compression" (the tasks).
"""

from mergeflow.modalities.vision.sources.real_tasks.task import RealTask

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

SIX_OF_FOURTEEN = (
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
