"""Vocabularies that differ: tokenizers, and embeddings and heads brought into line by token instead of by row."""
