"""The six tasks that extend the 14 to the 20-task benchmark.

EMNIST, FashionMNIST and KMNIST are not in CLIP's lists; names and prompts are those of the 20-task benchmark's code.

Source: Radford et al. 2021 (prompts); Wang et al. 2024, "Localizing Task Information for Improved Model Merging and
Compression" (the tasks, and prompts of the three).
"""

from mergeflow.modalities.vision.sources.real_tasks.fourteen import CIFAR_TEMPLATES
from mergeflow.modalities.vision.sources.real_tasks.task import RealTask

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_SYLLABLES = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
_AN_OR_THE = ("a photo of a {}.", "a photo of the {}.")

SIX_OF_TWENTY = (
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
