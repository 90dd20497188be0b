"""The kinds of models and examples that a project can have, one folder each."""
