"""Open an architecture for work on its image tower, and check that heads fit it."""

from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import ClipModel, load_clip


def open_model(
    architecture: str, device: str, *, pretrained: str | None = None, image_size: int | None = None
) -> ClipModel:
    """Load an architecture.

    Args:
        pretrained: A tag or local file with the whole CLIP, where the text tower is needed.
        image_size: Side of the images in pixels, where the caller counts on one.
    """
    clip = load_clip(architecture, pretrained, device)
    if image_size not in (None, clip.image_size):
        raise MergeflowError(
            f"model.image_size is {image_size}, but {architecture} takes {clip.image_size}: "
            f"set it to {clip.image_size}, or leave it out."
        )
    return clip


def check_head(task: str, head: Head, class_names: list[str], clip: ClipModel) -> None:
    """Refuse a head of other classes than the data's, or of other features than the model's.

    Args:
        head: of C classes on features [n, D].
    """
    differing = [f"{a!r} / {b!r}" for a, b in zip(head.class_names, class_names, strict=False) if a != b]
    if len(head.class_names) != len(class_names) or differing:
        difference = f": {differing[0]} (head / data)" if differing else ""
        raise MergeflowError(
            f"task '{task}': the head has {len(head.class_names)} classes and the data {len(class_names)}{difference}. "
            "Build the head from this data's class names."
        )
    width = clip.model.visual.output_dim
    if head.weight.shape[1] != width:
        raise MergeflowError(
            f"task '{task}': the head takes features of {head.weight.shape[1]} numbers, the model gives {width}: "
            "use a head built with this architecture."
        )
