"""The studies of papers, above everything else: nothing imports them."""
