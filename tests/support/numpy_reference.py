"""Losses and gradients in plain NumPy float64, written from the papers' formulas alone.

Gradients by central differences of the losses: slow, and independent of every derivation.
"""

import numpy as np


def forward(layers, head, x):
    """ReLU perceptron; layers and head are (weight [in, out], bias [out])."""
    for weight, bias in layers:
        x = np.maximum(x @ weight + bias, 0.0)
    return x @ head[0] + head[1]


def squashed_log_prob(mean, log_std, noise):
    """Log-density of tanh(mean + std noise), with 1 - tanh^2 = 1 / cosh^2; the last axis is components."""
    u = mean + np.exp(log_std) * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return np.tanh(u), (normal + 2 * (np.logaddexp(u, -u) - np.log(2))).sum(-1)


def central_difference(loss, vector, indices, step=1e-6):
    """d loss / d vector[i] for the given indices; ``vector`` is changed in place and restored."""
    result = []
    for index in indices:
        kept = vector[index]
        vector[index] = kept + step
        high = loss()
        vector[index] = kept - step
        low = loss()
        vector[index] = kept
        result.append((high - low) / (2 * step))
    return np.array(result)
