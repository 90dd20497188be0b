"""Permutations of a net's units that change nothing it computes, chosen so that two nets lie close to each other."""
