"""Networks: perceptrons with hand-derived gradients, and those with convolutions, memories, heads or user code."""
