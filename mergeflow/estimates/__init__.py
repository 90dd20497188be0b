"""Quantities that are estimated from examples and that merge methods take: Fisher, Gram, entropy."""
