"""A project: its parameters, its graph of stages, and how one stage is run."""
