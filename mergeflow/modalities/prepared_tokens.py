"""Prepared tokens belong to the tokenizer of the base."""

from collections.abc import Mapping
from typing import Any

from mergeflow.errors import MergeflowError


def check_prepared(manifests: Mapping[str, Any], digest: str, named: str, pretrained: str) -> None:
    """Refuse splits that were prepared with another tokenizer than the base's.

    Args:
        manifests: of every task by its name.
        digest: of the base's tokenizer.
        named: `data.tokenizer` of params.yaml.
        pretrained: `model.pretrained`.

    Raises:
        MergeflowError: the manifests of some tasks have another digest; they are all named.
    """
    other = [task for task, one in manifests.items() if one["decoding"].get("tokenizer") != digest]
    if other:
        raise MergeflowError(
            f"the texts of {', '.join(other)} were prepared with the tokenizer of '{named}' (data.tokenizer), "
            f"which is not that of '{pretrained}' (model.pretrained): give both the same name."
        )
