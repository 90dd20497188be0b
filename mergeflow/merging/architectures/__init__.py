"""What the tensors of known architectures are: their roles, and how fused weights are cut into matrices."""
