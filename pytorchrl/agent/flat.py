"""Store each parameter group in one vector, which is sent, averaged, clipped and updated as one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pytorchrl.errors import WeightsError


class FlatParameters:
    """A vector of parameters and a vector of gradients; each parameter and its gradient become views of these vectors.

    The parameters keep their identity, names and shapes, and share memory with the vector. Gradients exist from the
    start and are accumulated in place. Clear the gradients with `zero_grad()` of this class and not with
    `module.zero_grad()`, which would replace the views.
    """

    data: Tensor
    """(P,) float32, the concatenated parameters, each in row-major order."""
    grad: Tensor
    """(P,) float32, the gradients in the same order; 0 for parameters that do not require gradients."""
    trained: list[nn.Parameter]
    """The parameters that required gradients when this object was built; all others keep their values."""

    def __init__(self, params: Iterable[nn.Parameter] | Mapping[str, nn.Parameter]) -> None:
        """Move the parameters into one vector, in the given order; a parameter that occurs twice is stored once.

        Args:
            params: Float32 parameters on one device; the keys of a mapping, such as `dict(module.named_parameters())`,
                are their names.

        Raises:
            WeightsError: There are no parameters, or not all of them are float32 and on the same device.
        """
        if not isinstance(params, Mapping):
            params = {str(index): param for index, param in enumerate(params)}
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, param in params.items():
            unique.setdefault(id(param), (name, param))
        named = dict(unique.values())
        if not named:
            raise WeightsError("a parameter group needs at least one parameter, got none")
        device = next(iter(named.values())).device
        for name, param in named.items():
            if param.device != device:
                raise WeightsError(
                    f"parameter {name!r} must be on {device}, got {param.device}; build networks in build_networks, "
                    "after which they are moved to the device")
            if param.dtype != torch.float32:
                raise WeightsError(
                    f"parameter {name!r} must be float32, got {param.dtype}; build networks without .double() or "
                    ".half(), and with torch.float32 as the default dtype of torch")
        self._params = named
        self.trained = [param for param in named.values() if param.requires_grad]
        self._frozen = None if len(self.trained) in (0, len(named)) else torch.cat(
            [torch.full((param.numel(),), not param.requires_grad, device=device) for param in named.values()])
        self.data = torch.cat([param.detach().reshape(-1) for param in named.values()])
        self.grad = torch.zeros_like(self.data)
        data_views, grad_views = self.split(self.data), self.split(self.grad)
        for name, param in named.items():
            param.data = data_views[name]
            param.grad = grad_views[name]

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of the vector."""
        return list(self._params)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by name, in the order of the vector."""
        return {name: tuple(param.shape) for name, param in self._params.items()}

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order of the vector."""
        return list(self._params.values())

    def __len__(self) -> int:
        """Return P, the number of scalars."""
        return self.data.numel()

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return one view of `vector` (P,) for each parameter, by name, in the parameter's shape."""
        self.check(vector)
        pieces = torch.split(vector, [param.numel() for param in self._params.values()])
        return {name: piece.view(param.shape) for (name, param),
                piece in zip(self._params.items(), pieces, strict=True)}

    def check(self, vector: Tensor) -> None:
        """Raise `WeightsError` unless `vector` has the shape (P,)."""
        if tuple(vector.shape) != tuple(self.data.shape):
            raise WeightsError(
                f"a vector of shape {tuple(vector.shape)} does not fit this group of {len(self._params)} parameters "
                f"with {len(self)} scalars; sender and receiver need the same network")

    def frozen(self) -> Tensor | None:
        """Return a copy of the scalars that are not trained; None if all or none are trained."""
        return None if self._frozen is None else self.data[self._frozen]

    def restore_frozen(self, values: Tensor | None) -> None:
        """Copy a result of `frozen` back, because an optimizer's weight decay also changes them."""
        if values is not None:
            self.data[self._frozen] = values

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self.grad.zero_()
