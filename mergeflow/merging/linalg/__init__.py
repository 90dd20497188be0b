"""Linear algebra: what the methods compute with."""
