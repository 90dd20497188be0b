"""Tasks of digits, coloured by parity or shown in other looks, and the small nets and CLIPs that are tuned on them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from mergeflow.data.task import Place
from mergeflow.data.transforms import chance
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.accuracy import accuracies
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.modules import own_generator
from mergeflow.modalities.nets import on_pixels
from mergeflow.modalities.vision.models import ClipModel, ImageEncoder, build_head, load_clip
from mergeflow.modalities.vision.preparation import PARITY, colour, image_decoding, open_images
from mergeflow.modality import Model, Network, State
from mergeflow.training import FineTuneSettings
from studies.lab.tuning import combined, drawn_weights, trained
from suites.pocket.drawn.digits import NUMBERS
from tasks.project.sections import Section

# A CLIP that answers about digits


class ClipBase(Section):
    """What Ψ^(0) is instead of a net from nothing."""

    architecture: str = "pocket-clip"  # architecture, pretrained: as in params.yaml's `model`
    pretrained: str = "pocket8"
    # `zero-shot`, from the prompts and frozen, or `trained`, from the same prompts and tuned beside the tower
    head: Literal["zero-shot", "trained"] = "zero-shot"
    # prompts; `{}` stands for a digit's name, such as seven
    templates: list[str] = Field(["a photo of handwritten digit {}"], min_length=1)


class _Answering(nn.Module):
    """Logits s · f Wᵀ of the tower's features f; W is a part of the weights only if it is trained."""

    def __init__(self, clip: ClipModel, rows: Tensor, scale: float, trained: bool) -> None:
        super().__init__()
        self.tower, self.scale = ImageEncoder(clip), scale
        if trained:
            self.rows: Tensor = nn.Parameter(rows)
        else:
            self.register_buffer("rows", rows, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits [n, C] of pixels [n, 3, S, S] in −1 … 1, as the studies' nets take them."""
        images = ((pixels + 1) * 127.5).permute(0, 2, 3, 1)  # the tower normalises by itself
        logits: Tensor = self.scale * self.tower(images) @ self.rows.T
        return logits


def clip_of_digits(chosen: ClipBase, size: int, groups: Sequence[Sequence[int]]) -> Network:
    """Return a CLIP with a logit for each group of digits.

    w_g = n(1/|g| Σ_{d∈g} n(text(d)))
    """
    clip = load_clip(chosen.architecture, chosen.pretrained)
    if clip.image_size != size:
        raise MergeflowError(
            f"{chosen.architecture} takes pictures of {clip.image_size} pixels a side and the world's `size` is "
            f"{size}: write size: {clip.image_size}."
        )
    ten = build_head(clip, NUMBERS, chosen.templates)
    rows = torch.stack([ten.weight.detach()[list(group)].mean(0) for group in groups])
    rows = nn.functional.normalize(rows, dim=1)
    return Network(_Answering(clip, rows, ten.logit_scale, chosen.head == "trained").eval())


# Coloured digits


SPLITS = ("train", "validation", "test")


class Adapting(Section):
    """AdamW with a short warm-up and a cosine, in steps."""

    steps: int = Field(ge=1)
    batch_size: int = Field(default=32, ge=1)
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(default=0.01, ge=0)

    def settings(self) -> FineTuneSettings:
        """Return these as the settings of the one training loop."""
        return FineTuneSettings(regime="steps", save_every=1_000_000, **self.model_dump())


class ColouredWorld(Section):
    """Digits of one source, coloured by parity, and a net that first learnt the ten digits in white, or a CLIP."""

    source: str  # an address of ten digits, as in params.yaml's `tasks`, or of ten classes of other pictures
    odd: list[int] | None = None  # the classes that count as odd, by place; by default those that name an odd digit
    size: int = Field(32, ge=8)  # pixels a side
    train: int = Field(ge=32)  # train, validation, test: examples of each task
    validation: int = Field(ge=16)
    test: int = Field(ge=16)
    # share of the labels that are the other parity, before colouring (Arjovsky et al. take 0.25)
    noise: float = Field(0.0, ge=0, lt=0.5)
    width: int = Field(48, ge=4)  # width, depth, heads, patch: of the transformer
    depth: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    patch: int = Field(8, ge=2)
    mlp: int = Field(2, ge=1)  # width of its MLPs, in widths
    clip: ClipBase | None = None  # instead of it and of `pretrain` the image tower of a CLIP
    pretrain: Adapting  # pretrain, tune: how long and how fast; a study replaces the steps of `tune` by its lengths
    tune: Adapting


class Digits(NamedTuple):
    """One split in black and white.

    Attributes:
        grey: uint8 [n, S, S].
        digit: 0 to 9, int64 [n].
        odd: bool [n], with the noise in the labels.
        chance: float64 [n]: an odd digit is red where it is below r_o, an even one where it is below 1 − r_o.
    """

    grey: np.ndarray
    digit: np.ndarray
    odd: np.ndarray
    chance: np.ndarray


def open_digits(world: ColouredWorld, root: Path) -> dict[str, Digits]:
    """Return the splits of a world's source, each digit drawn once for all colours."""
    raw = open_images(world.source.partition("?")[0].rpartition("/")[2], world.source, root=root)
    names = raw.class_names
    if world.odd is not None:
        names = [str(int(place in world.odd)) for place in range(len(names or ()))]
    decode, parity = image_decoding(world.size).decode, colour("1", names)
    digits_by_split = {}
    for split, count in zip(SPLITS, (world.train, world.validation, world.test), strict=True):
        grey, digit, odd, draws = [], [], [], []
        # A source without validation, as MNIST, gives it the training digits behind those trained on.
        source, first = (split, 0) if split in raw.splits else ("train", world.train)
        for row, example in enumerate(islice(raw.splits[source](), first, first + count)):
            place = Place(split, row, raw.seed)
            changed = parity.apply(example, place)
            assert changed is not None
            noisy = chance("label noise", place) < world.noise
            grey.append(np.asarray(decode(changed, world.source).arrays["images"]).max(2))  # one channel has all
            digit.append(example.label)
            odd.append(bool(changed.label) != noisy)
            draws.append(chance("colour", place))
        digits_by_split[split] = Digits(np.stack(grey), np.array(digit), np.array(odd), np.array(draws))
    return digits_by_split


def coloured(digits: Digits, red_if_odd: float, name: str) -> Classification:
    """Return the task of a colouring: label 1 is odd, red with r_o for odd and 1 − r_o for even digits.

    Args:
        red_if_odd: r_o, in [0, 1].

    Source:
        Li et al. 2025, Section 4.1, with r_e = 1 − r_o; the same draws as the transform `?colour=`.
    """
    red = digits.chance < np.where(digits.odd, red_if_odd, 1 - red_if_odd)
    images = np.zeros((*digits.grey.shape, 3), np.uint8)
    images[red, :, :, 0], images[~red, :, :, 1] = digits.grey[red], digits.grey[~red]
    return _task(name, images, digits.odd.astype(np.int64))


def _task(name: str, images: np.ndarray, labels: np.ndarray) -> Classification:
    return Classification(name, torch.from_numpy(images), torch.from_numpy(labels), encode=on_pixels)


def small_transformer(world: ColouredWorld, classes: int, seed: int) -> Network:
    """Return torchvision's vision transformer in the world's size, with weights drawn by a seed."""
    from torchvision.models import VisionTransformer

    with own_generator(seed):
        net = VisionTransformer(
            world.size, world.patch, world.depth, world.heads, world.width, world.mlp * world.width, num_classes=classes
        )
        nn.init.normal_(net.heads[-1].weight, std=0.02)  # torchvision's zeros would hide the seed
    return Network(net.eval())


@dataclass(frozen=True)
class Pretrained:
    """What all experts of a seed begin from.

    Attributes:
        model: A module that weights are loaded into, two logits.
        start: Ψ^(0): what knows the ten digits in white, with a fresh head for the parity.
    """

    model: Model
    start: dict[str, Tensor]


def from_clip(net: Network) -> Pretrained:
    """Return the starting point of experts that are tuned from a CLIP."""
    return Pretrained(net, drawn_weights(net))


def pretrained(world: ColouredWorld, digits: Mapping[str, Digits], seed: int) -> Pretrained:
    """Return a transformer that tells the ten digits in white, with a fresh head of two logits; or a CLIP."""
    if world.clip is not None:
        return from_clip(clip_of_digits(world.clip, world.size, [range(0, 10, 2), range(1, 10, 2)]))
    white = np.repeat(digits["train"].grey[..., None], 3, axis=3)
    ten = small_transformer(world, 10, seed)
    learnt = trained(ten, ten.state(), _task("digits", white, digits["train"].digit), world.pretrain, seed)
    two = small_transformer(world, len(PARITY), seed)
    start = {name: value.clone() for name, value in two.state().items()}
    return Pretrained(two, {name: learnt[name] if not name.startswith("heads.") else start[name] for name in start})


def tuned(
    world: ColouredWorld, base: Pretrained, digits: Digits, colours: Sequence[float], steps: int, seed: int
) -> dict[str, dict[str, Tensor]]:
    """Return the experts of some colourings after so many steps: name → weights.

    Args:
        colours: r_o of each.
        steps: of tuning.
    """
    adapting = world.tune.model_copy(update={"steps": steps})
    return {
        name_of(colour): trained(base.model, base.start, coloured(digits, colour, name_of(colour)), adapting, seed)
        for colour in colours
    }


@dataclass(frozen=True)
class Coloured:
    """Task vectors of experts on coloured digits, by task, and what sums of them are judged on.

    Attributes:
        splits: of the digits.
        vectors: ΔΨ by the task's name.
    """

    base: Pretrained
    splits: Mapping[str, Digits]
    vectors: Mapping[str, State]

    def task(self, red_if_odd: float, split: str) -> Classification:
        return coloured(self.splits[split], red_if_odd, name_of(red_if_odd))

    def accuracies(self, scales: Mapping[float, float], judged: Sequence[float], split: str) -> list[float]:
        """Return the accuracy of Ψ^(0) + Σ λ ΔΨ on tasks, in %.

        Args:
            scales: r_o → λ.
        """
        state = combined(self.base.start, self.vectors, {name_of(colour): scale for colour, scale in scales.items()})
        return list(accuracy(self.base.model, state, {name_of(r): self.task(r, split) for r in judged}).values())


def name_of(red_if_odd: float) -> str:
    """Return the name of a colouring's task.

    Example:
        >>> name_of(0.95)
        'r0.95'
    """
    return f"r{red_if_odd:g}"


def accuracy(model: Model, state: State, tasks: Mapping[str, Classification]) -> dict[str, float]:
    """Return a model's accuracy on each task, in %.

    Args:
        model: the network, whose weights are overwritten.
    """
    model.load(state)
    with torch.inference_mode():
        return {name: 100 * value for name, value in accuracies(model, tasks, 1024).items()}


# Digits in one look: turned, outlined or in other colours


TEN = tuple(range(10))


@dataclass(frozen=True)
class Look:
    """How digits are shown.

    Attributes:
        angle: they are turned by, in degrees.
        dark: black on yellow instead of white on black.
        outlined: only the edges of the strokes are drawn.
    """

    angle: float = 0.0
    dark: bool = False
    outlined: bool = False

    def show(self, grey: np.ndarray) -> np.ndarray:
        """Return pictures uint8 [n, S, S, 3].

        Args:
            grey: white on black, uint8 [n, S, S].
        """
        from scipy.ndimage import morphological_gradient, rotate

        turned = rotate(grey, self.angle, axes=(2, 1), reshape=False, order=1) if self.angle else grey
        if self.outlined:
            turned = morphological_gradient(turned, size=(1, 3, 3))
        if not self.dark:
            return np.repeat(turned[..., None], 3, axis=3)
        light = 255 - turned
        return np.stack([light, light, np.zeros_like(light)], axis=3)


def shown(digits: Digits, look: Look, name: str, chosen: Collection[int] = TEN) -> Classification:
    """Return a task of ten classes, of which it has the chosen ones."""
    rows = np.isin(digits.digit, list(chosen))
    images, labels = look.show(digits.grey[rows]), digits.digit[rows]
    return Classification(name, torch.from_numpy(images), torch.from_numpy(labels), encode=on_pixels)


def ten_digits(world: ColouredWorld, digits: Mapping[str, Digits], seed: int) -> Pretrained:
    """Return a small transformer that has learnt to tell the ten digits, white on black and upright; or a CLIP."""
    if world.clip is not None:
        return from_clip(clip_of_digits(world.clip, world.size, [(digit,) for digit in TEN]))
    net = small_transformer(world, 10, seed)
    return Pretrained(net, trained(net, net.state(), shown(digits["train"], Look(), "digits"), world.pretrain, seed))
