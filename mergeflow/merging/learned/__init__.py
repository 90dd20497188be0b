"""AdaMerging: coefficients that are learned from data without labels."""
