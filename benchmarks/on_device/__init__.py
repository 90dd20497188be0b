"""The sections of `benchmarks/device.py`: each measures one thing and returns rows of a table."""
