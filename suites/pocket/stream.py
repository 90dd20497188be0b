"""Drawings for pre-training, none of them an image of a task; imports no torch, so that workers start fast."""

import numpy as np

from suites.pocket import get_suite
from suites.pocket.canvas import CLIP_ART, PHOTO
from suites.pocket.core import generator


def draw_chunk(suite: str, task: str, start: int, stop: int, photo_share: float, seed: int) -> np.ndarray:
    """Draw images `start` to `stop` of a task's stream.

    Args:
        start: first index; the label of image i is i modulo the number of classes.
        stop: index after the last.
        photo_share: share of the images in the task's own style, the rest is clip art.

    Returns:
        uint8 [stop - start, 32, 32, 3].

    Example:
        >>> draw_chunk("pocket8", "land", 10, 12, 0.5, 0).shape
        (2, 32, 32, 3)
    """
    drawn = get_suite(suite).tasks[task]
    images = []
    for index in range(start, stop):
        rng = generator(task, "pretrain", seed, index)
        style = PHOTO if rng.random() < photo_share else CLIP_ART
        images.append(drawn.paint(rng, index % len(drawn.class_names), style))
    return np.stack(images)
