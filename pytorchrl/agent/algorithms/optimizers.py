"""Optimisers of one flat parameter vector. P = number of scalars."""

from __future__ import annotations

import math

import torch
from torch import Tensor

OPTIMIZERS = ("adam", "sgd", "rmsprop", "rmsprop_tf")


class FlatOptimizer:
    """Adam, SGD or RMSProp on one vector: a handful of in-place operations, and moments that are plain tensors."""

    def __init__(self, name: str, like: Tensor, *, adam_eps: float, rmsprop_eps: float, rmsprop_decay: float) -> None:
        """Make the moments for vectors like `like` (P,).

        Args:
            name: "adam" (Kingma & Ba 2015), "sgd", "rmsprop" (epsilon outside the root, first mean square 0), or
                "rmsprop_tf" (TensorFlow's: epsilon inside the root, first mean square 1).
            like: (P,) float32.
            adam_eps: Added to Adam's root.
            rmsprop_eps: Added to RMSProp's root, or inside it.
            rmsprop_decay: Decay of RMSProp's mean square.
        """
        self.name, self._eps = name, adam_eps if name == "adam" else rmsprop_eps
        self._betas = (0.9, 0.999) if name == "adam" else (0.0, rmsprop_decay)
        self._scratch = torch.empty_like(like)
        self.num_steps = 0
        self.moments: dict[str, Tensor] = {}
        if name == "adam":
            self.moments["mean"] = torch.zeros_like(like)
        if name != "sgd":
            self.moments["mean_square"] = torch.ones_like(like) if name == "rmsprop_tf" else torch.zeros_like(like)

    def step(self, params: Tensor, gradient: Tensor, lr: float, scale: float) -> None:
        """Move `params` (P,) in place along `scale * gradient`; `gradient` (P,) is only read."""
        self.num_steps += 1
        if self.name == "sgd":
            params.add_(gradient, alpha=-lr * scale)
            return
        mean_decay, square_decay = self._betas
        square = self.moments["mean_square"]
        square.mul_(square_decay).addcmul_(gradient, gradient, value=(1.0 - square_decay) * scale * scale)
        if self.name == "adam":
            mean = self.moments["mean"]
            mean.mul_(mean_decay).add_(gradient, alpha=(1.0 - mean_decay) * scale)
            root = torch.sqrt(square, out=self._scratch)
            root.mul_(1.0 / math.sqrt(1.0 - square_decay**self.num_steps)).add_(self._eps)
            params.addcdiv_(mean, root, value=-lr / (1.0 - mean_decay**self.num_steps))
        elif self.name == "rmsprop":
            params.addcdiv_(gradient, torch.sqrt(square, out=self._scratch).add_(self._eps), value=-lr * scale)
        else:
            root = torch.add(square, self._eps, out=self._scratch).sqrt_()
            params.addcdiv_(gradient, root, value=-lr * scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the moments, on the CPU, and the number of steps."""
        state = {name: moment.cpu().clone() for name, moment in self.moments.items()}
        return {**state, "num_steps": torch.tensor(self.num_steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy `state_dict()` of an optimiser of the same kind and size."""
        for name, moment in self.moments.items():
            moment.copy_(state[name])
        self.num_steps = int(state["num_steps"])
