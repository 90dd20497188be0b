"""Linear algebra and exact selection: what the methods compute with."""
