"""Zero-shot classification heads from class prompts."""

from collections.abc import Sequence

import torch

from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import ClipModel


@torch.no_grad()
def build_head(clip: ClipModel, class_names: Sequence[str], templates: Sequence[str]) -> Head:
    r"""Build a zero-shot head: for each class the mean of its prompts' text features.

    w_c = n(1/|P| Σ_p n(text(p(c)))) with n(x) = x / ||x||.

    Args:
        templates: prompts in which `{}` stands for the class name.
    """
    _check_prompts(class_names, templates)
    device = next(clip.model.parameters()).device
    clip.model.eval()
    rows = []
    for name in class_names:
        tokens = clip.tokenizer([template.replace("{}", name) for template in templates]).to(device)
        features = clip.model.encode_text(tokens).float()
        mean = torch.nn.functional.normalize(features, dim=-1).mean(dim=0)
        rows.append(torch.nn.functional.normalize(mean, dim=0))
    return Head(torch.stack(rows).cpu(), float(clip.model.logit_scale.exp()), list(class_names))


def _check_prompts(class_names: Sequence[str], templates: Sequence[str]) -> None:
    if not class_names or not templates:
        raise MergeflowError(
            f"a head needs at least one class and one template; found {len(class_names)} and {len(templates)}."
        )
    twice = sorted({name for name in class_names if list(class_names).count(name) > 1})
    if twice:
        raise MergeflowError(f"class names occur more than once: {', '.join(twice)}. Give every label its own name.")
    bare = [template for template in templates if "{}" not in template]
    if bare:
        raise MergeflowError(f"templates without a place for the class name: {bare}. Write {{}} where it belongs.")
