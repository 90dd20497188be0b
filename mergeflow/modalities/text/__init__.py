"""Texts and pairs of texts as a modality: an encoder of transformers is merged, each task trains a head of its own."""
