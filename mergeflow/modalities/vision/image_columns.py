"""The Hugging Face image convention in Parquet: a struct {bytes, path}, an integer label, names in the metadata."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from mergeflow.data.address import checked_columns
from mergeflow.errors import MergeflowError

METADATA_KEY = b"huggingface"
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
EXPECTED = (
    "one image column of type struct<bytes: binary, path: string>, one integer label column, and ClassLabel names "
    "for it in the schema metadata under 'huggingface'"
)


def image_schema(class_names: Sequence[str] | None) -> pa.Schema:
    """Return the schema that `datasets` reads back as {image: Image(), label: ClassLabel(names)}.

    Example:
        >>> image_schema(["cat", "dog"]).names
        ['image', 'label']
    """
    features = {"image": {"_type": "Image"}, "label": {"names": list(class_names or ()), "_type": "ClassLabel"}}
    metadata = json.dumps({"info": {"features": features}}, ensure_ascii=False)
    return pa.schema([("image", IMAGE_TYPE), ("label", pa.int64())], metadata={METADATA_KEY: metadata.encode()})


def find_columns(
    schema: pa.Schema, where: str, numbered: Sequence[str] = (), chosen: Mapping[str, str] | None = None
) -> tuple[str, str, list[str]]:
    """Return (image column, label column, class names) of a schema in the convention.

    A column that the metadata declares as Image or ClassLabel wins; among several, one named `image` or `label`.

    Args:
        numbered: class names by label for data whose labels are bare numbers or truth values; else there is an error.
        chosen: the names of columns that are chosen, by what they are: `image`, `label`.

    Example:
        >>> find_columns(image_schema(["cat", "dog"]), "pets.parquet")
        ('image', 'label', ['cat', 'dog'])
    """
    chosen = checked_columns(schema.names, where, chosen or {}, ("image", "label"))
    features = _features(schema, where)
    declared = {kind: [n for n, f in features.items() if _is(f, kind)] for kind in ("Image", "ClassLabel")}

    def is_label(column: pa.DataType) -> bool:
        return pa.types.is_integer(column) or (bool(numbered) and pa.types.is_boolean(column))

    images = declared["Image"] or [field.name for field in schema if _is_image(field.type)]
    labels = declared["ClassLabel"] or [field.name for field in schema if is_label(field.type)]
    image = chosen.get("image") or _choose(images, "image")
    label = chosen.get("label") or _choose(labels, "label")
    wrong = None
    if image is None or image not in schema.names or not _is_image(schema.field(image).type):
        wrong = "no single image column"
    elif label is None or label not in schema.names or not is_label(schema.field(label).type):
        wrong = "no single integer label column"
    elif label not in declared["ClassLabel"] and not numbered:
        wrong = f"no ClassLabel names for column '{label}'"
    if wrong or image is None or label is None:
        fields = ", ".join(f"{field.name}: {field.type}" for field in schema) or "no columns"
        raise MergeflowError(
            f"{where}: {wrong}. Columns found: {fields}. Expected: {EXPECTED}. Choose columns by "
            "`?image=NAME&label=NAME`, or write the file with datasets' to_parquet or push_to_hub."
        )
    return (
        image,
        label,
        [str(name) for name in (features[label]["names"] if label in declared["ClassLabel"] else numbered)],
    )


def _features(schema: pa.Schema, where: str) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        return {}
    try:
        features = json.loads(raw)["info"]["features"]
    except (ValueError, KeyError, TypeError) as error:
        raise MergeflowError(
            f"{where}: the schema metadata under 'huggingface' is not readable ({error!r}). Expected: {EXPECTED}."
        ) from error
    return features if isinstance(features, dict) else {}


def _is(feature: Any, kind: str) -> bool:
    if not isinstance(feature, dict) or feature.get("_type") != kind:
        return False
    return kind != "ClassLabel" or isinstance(feature.get("names"), list)


def _is_image(column: pa.DataType) -> bool:
    if not pa.types.is_struct(column):
        return False
    fields = {column.field(i).name: column.field(i).type for i in range(column.num_fields)}
    content = fields.get("bytes")
    return (
        "path" in fields and content is not None and (pa.types.is_binary(content) or pa.types.is_large_binary(content))
    )


def _choose(names: Sequence[str], preferred: str) -> str | None:
    if len(names) == 1:
        return names[0]
    return preferred if preferred in names else None
