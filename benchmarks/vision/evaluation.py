"""Measure the evaluation of one candidate on eight tasks beside open_clip's plain zero-shot loop: same model, same run.

    python -m benchmarks.vision.evaluation                                  # the embedded model
    python -m benchmarks.vision.evaluation --model ViT-B-32 --images 8 --rounds 3 --beside "plain, tensors"
    python -m benchmarks.vision.evaluation --device cuda --model ViT-B-32 --images 500

A pass of each: the candidate's weights go into the model, every image is encoded, every prediction is compared with its
label. What a pass pays besides depends on who does it:

    mergeflow        images decoded once as uint8, heads built once
    plain            PNG decoded and preprocessed by a DataLoader, heads built: an evaluation as open_clip's code has it
    plain, heads     the same, but its heads were built once
    plain, tensors   heads built once and all images preprocessed once: float tensors through a DataLoader
    plain, slices    the same tensors without a DataLoader: what remains is the model alone

Passes are interleaved after one warm pass of each; times and ratios are medians over the rounds, a ratio being that of
two passes of one round. On a CPU one thread's processor time counts, on CUDA wall time. `same` is the share of
predictions that agree; the ways differ in rounding.
"""

import argparse
import io
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mergeflow.evaluation import Judge
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.images import encode_png, resize, to_rgb
from mergeflow.modalities.vision.models import POCKET, ClipModel, build_head, image_model, load_clip
from mergeflow.training.settings import Precision
from suites.pocket import SuiteTask, get_suite

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Pictures:
    """One task's images as files: PNG bytes, and labels."""

    task: SuiteTask
    files: list[bytes]
    labels: list[int]


def draw(count: int, side: int) -> list[Pictures]:
    """Return the first validation images of every task of pocket8; for a larger model enlarged beyond its input."""
    drawn = []
    for task in get_suite("pocket8").tasks.values():
        pairs = [task.sample("validation", index) for index in range(count)]
        images = [Image.fromarray(pixels) for pixels, _ in pairs]
        if side > 32:
            images = [image.resize((side * 8 // 7, side * 8 // 7)) for image in images]
        drawn.append(Pictures(task, [encode_png(image) for image in images], [label for _, label in pairs]))
    return drawn


class Files(Dataset[tuple[Tensor, int]]):
    """A data set that decodes and preprocesses an image whenever it is asked for it."""

    def __init__(self, pictures: Pictures, preprocess: Callable[[Image.Image], Tensor]) -> None:
        self.pictures, self.preprocess = pictures, preprocess

    def __len__(self) -> int:
        return len(self.pictures.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.preprocess(Image.open(io.BytesIO(self.pictures.files[row]))), self.pictures.labels[row]


class Plain:
    """open_clip's way: a DataLoader of preprocessed images, encode_image, unit features times the classifier."""

    def __init__(self, clip: ClipModel, pictures: list[Pictures], ours: "Ours", batch_size: int) -> None:
        self.clip, self.pictures, self.batch_size = clip, pictures, batch_size
        self.state = {name.removeprefix("visual."): tensor for name, tensor in ours.state.items()}
        self.device = next(clip.model.parameters()).device
        preprocess = open_clip.image_transform(clip.image_size, is_train=False, mean=clip.mean, std=clip.std)
        self.files = [Files(task, preprocess) for task in pictures]
        self.tensors = [next(iter(DataLoader(files, batch_size=len(files)))) for files in self.files]
        self.heads = [task.head.weight.T for task in ours.tasks]

    def build_head(self, task: SuiteTask) -> Tensor:
        """Return open_clip's zero-shot classifier, [width, classes]."""
        names, templates = list(task.class_names), list(task.templates)
        with torch.no_grad():
            return open_clip.build_zero_shot_classifier(
                self.clip.model, self.clip.tokenizer, names, templates, device=self.device
            )

    def decoding(self) -> list[Tensor]:
        """Return which predictions are right, bool [N] for each task: images decoded and heads built in every pass."""
        heads = [self.build_head(task.task) for task in self.pictures]
        return self._predict([DataLoader(files, batch_size=self.batch_size) for files in self.files], heads)

    def decoding_with_heads(self) -> list[Tensor]:
        """Return the same, bool [N] for each task, with heads that were built once."""
        return self._predict([DataLoader(files, batch_size=self.batch_size) for files in self.files], self.heads)

    def preprocessed(self) -> list[Tensor]:
        """Return the same, bool [N] for each task, from images that were preprocessed once, through a DataLoader."""
        loaders = [DataLoader(TensorDataset(*pair), batch_size=self.batch_size) for pair in self.tensors]
        return self._predict(loaders, self.heads)

    def sliced(self) -> list[Tensor]:
        """Return the same, bool [N] for each task, from preprocessed images without a DataLoader."""
        batches = [zip(*(part.split(self.batch_size) for part in pair), strict=True) for pair in self.tensors]
        return self._predict(batches, self.heads)

    def _predict(self, tasks: Iterable[Batches], heads: list[Tensor]) -> list[Tensor]:
        model: Any = self.clip.model
        model.visual.load_state_dict(self.state)
        batches_right = []
        for batches, head in zip(tasks, heads, strict=True):
            correct = []
            with torch.no_grad():
                for images, labels in batches:
                    features = model.encode_image(images.to(self.device))
                    features /= features.norm(dim=-1, keepdim=True)
                    correct.append((100.0 * features @ head).argmax(dim=-1) == labels.to(self.device))
            batches_right.append(torch.cat(correct))
        return batches_right


PLAIN: dict[str, Callable[[Plain], Callable[[], list[Tensor]]]] = {
    "plain": lambda plain: plain.decoding,
    "plain, heads": lambda plain: plain.decoding_with_heads,
    "plain, tensors": lambda plain: plain.preprocessed,
    "plain, slices": lambda plain: plain.sliced,
}


class Ours:
    """This project's way, as `CandidateScorer` goes: one model, decoded images and heads; weights are copied in."""

    def __init__(
        self, clip: ClipModel, pictures: list[Pictures], batch_size: int, precision: Precision = "float32"
    ) -> None:
        self.model = image_model(clip)
        self.judge = Judge(self.model, batch_size, precision)
        self.state = {name: tensor.clone() for name, tensor in self.model.state().items()}
        device = next(clip.model.parameters()).device
        self.tasks = [self._decode(clip, task, device) for task in pictures]

    def _decode(self, clip: ClipModel, pictures: Pictures, device: torch.device) -> Classification:
        pixels = np.stack([resize(to_rgb(file, "file"), clip.image_size) for file in pictures.files])
        head = build_head(clip, pictures.task.class_names, pictures.task.templates).to(device)
        labels = torch.tensor(pictures.labels, device=device)
        return Classification(pictures.task.name, torch.from_numpy(pixels), labels, head)

    def predict(self) -> list[Tensor]:
        """Return which predictions are right, bool [N] for each task."""
        self.model.load(self.state)
        return [torch.from_numpy(self.judge.scores(task).astype(bool)) for task in self.tasks]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time a pass: processor time on a CPU, wall time on CUDA."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began = clock()
    work()  # ends with predictions on the CPU, or waits below
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began


@dataclass(frozen=True)
class Row:
    """A way's median seconds of a pass and median ratio to ours, and the share of predictions like ours."""

    way: str
    seconds: float
    ratio: float
    same: float


def measure(model: str, count: int, batch_size: int, rounds: int, device: torch.device, peers: list[str]) -> list[Row]:
    """Return a row of ours and of each way beside it.

    Args:
        model: an architecture of open_clip, or the embedded one.
        rounds: how often each way is timed, in turn with the others; the median counts.
        peers: names of `PLAIN`.
    """
    weights = "pocket8" if model == POCKET else None
    clip = load_clip(model, weights, device)
    pictures = draw(count, clip.image_size)
    ours = Ours(clip, pictures, batch_size)
    plain = Plain(clip, pictures, ours, batch_size)
    ways: dict[str, Callable[[], list[Tensor]]] = {
        "mergeflow": ours.predict,
        **{name: PLAIN[name](plain) for name in peers},
    }
    hits = {name: torch.cat(way()).cpu() for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(seconds(way, device))
    return [
        Row(
            name,
            statistics.median(took),
            statistics.median(theirs / our for theirs, our in zip(took, times["mergeflow"], strict=True)),
            float((hits[name] == hits["mergeflow"]).double().mean()),
        )
        for name, took in times.items()
    ]


def main() -> None:
    """Parse the command line, measure, print one row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=POCKET)
    parser.add_argument("--images", type=int, default=100, help="of each of the eight tasks")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beside", nargs="+", default=list(PLAIN), choices=PLAIN, metavar="WAY", help="default all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(asked.device)
    rows = measure(asked.model, asked.images, asked.batch_size, asked.rounds, device, asked.beside)
    print(f"{asked.model}, 8 x {asked.images} images, batches of {asked.batch_size}, {asked.device}")
    print(f"{'':16}{'images/s':>10}{'ms a pass':>12}{'times ours':>12}{'same':>9}")
    for row in rows:
        speed = 8 * asked.images / row.seconds
        print(f"{row.way:16}{speed:10.0f}{1000 * row.seconds:12.1f}{row.ratio:12.2f}{row.same:9.4f}")


if __name__ == "__main__":
    main()
