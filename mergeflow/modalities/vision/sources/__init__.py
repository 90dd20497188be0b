"""Readers of labelled images: folders, Parquet snapshots, torchvision files and the Hugging Face hub."""

DEFAULT_TEMPLATES = ("a photo of a {}.",)
