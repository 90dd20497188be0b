"""A project: its parameters, its graph of stages, and its studies."""
