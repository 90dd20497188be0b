"""The one-layer Transformer in which task vectors are provably effective, and the conditions on their coefficients.

Source: Li et al. 2025, When is Task Vector Provably Effective for Model Editing?, Sections 3.2 to 3.5.
"""
