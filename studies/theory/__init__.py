"""The theory that the studies measure: gradient descent and merging, landscapes, coefficients, interference."""
