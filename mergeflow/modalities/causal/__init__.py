"""Causal language models as a modality: any model of transformers that continues a text is merged whole."""
