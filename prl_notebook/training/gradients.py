"""How far two gradients of the same parameters are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Gradient = Mapping[str, torch.Tensor]


def norm(gradient: Gradient) -> float:
    """L2 norm over all parameters."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()])).item()


def compare(gradient: Gradient, yardstick: Gradient) -> dict[str, Any]:
    """{"norm", "relative_error", "max_abs_difference", "bitwise"} as `Trainer.gradient` answers them."""
    difference = {name: gradient[name] - other for name, other in yardstick.items()}
    error = norm(difference)
    return {
        "norm": norm(gradient),
        "relative_error": error / norm(yardstick) if error else 0.0,
        "max_abs_difference": max(d.abs().max().item() for d in difference.values()),
        "bitwise": all(torch.equal(gradient[name], other) for name, other in yardstick.items()),
    }
