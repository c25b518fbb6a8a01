"""Normalisations of hidden rows. Each takes the view, because a batch's statistics couple the rows of all ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.nn.aggregate.aggregate import Request, Total
from weft.nn.layers.linear_transform import apply_rowwise
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedLayer
from weft.nn.view import View
from weft.utils.errors import InputError, unknown


class NoNorm(nn.Module):
    """Rows as they are."""

    def forward(self, _view: View, x: Tensor) -> Tensor:
        return x


class LayerNorm(nn.Module):
    """Each row to mean 0 and variance 1 (Ba, Kiros, Hinton 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, _view: View, x: Tensor) -> Tensor:
        return apply_rowwise(self._normalised, [x], [self.norm.weight, self.norm.bias])

    def _normalised(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, self.norm.normalized_shape, weight, bias, self.norm.eps)


class BatchNorm(PhasedLayer):
    """Each column to mean 0 and variance 1 over all vertices, each counted once (Ioffe and Szegedy 2015).

    Leave out the bias of the layer in front: nothing depends on it, so its gradient is rounding noise, which Adam would
    blow up to full steps, another one under every strategy.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, width: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    @classmethod
    def of(cls, norm: _BatchNorm) -> BatchNorm:
        """PyTorch's, whose parameters and statistics it shares. InputError for one without some of these."""
        if not (norm.affine and norm.track_running_stats and norm.momentum is not None):
            raise InputError(
                f"{norm} is without weights, running statistics or momentum: make it with affine=True, "
                "track_running_stats=True and a momentum"
            )
        made = cls(norm.num_features, momentum=norm.momentum, eps=norm.eps)
        made.weight, made.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(made, name, buffer)
        return made

    def begin(self, view: View, x: Tensor) -> Boundary | Tensor:
        del view
        if not self.training:
            return self.normalised(x, self.running_mean, self.running_var)
        return Boundary(request=Request(Total(), {"x": x}), rows={"x": x})

    def resume(self, view: View, state: BoundaryState) -> Boundary | Tensor:
        """Behind the first total to the squared distances from the mean, behind the second to the result."""
        x, count = state.rows["x"], view.num_vertices
        if "mean" in state.shared:
            return self.normalised(x, state.shared["mean"], state.result / count)
        mean = state.result / count
        learn = partial(self.learn, mean.detach(), count)
        squares = Request(Total(), {"x": apply_rowwise(_squares, [x], [mean])})
        return Boundary(request=squares, rows={"x": x}, shared={"mean": mean}, on_result=learn)

    @torch.no_grad()
    def learn(self, mean: Tensor, count: int, squares: Tensor) -> None:
        """Takes into the running statistics those of a batch: its mean, and the sum of the squares, [F]."""
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(squares / max(count - 1, 1), self.momentum)  # without bias, as PyTorch
        self.num_batches_tracked += 1

    def normalised(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Rows [n, F] by these statistics [F]."""
        return apply_rowwise(self._normalised, [x], [mean, var, self.weight, self.bias])

    def _normalised(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (x - mean) * (var + self.eps).rsqrt() * weight + bias


def _squares(x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean).square()


def make_norm(name: str, width: int) -> nn.Module:
    """The normalisation of that name for rows of that width."""
    if name == "none":
        return NoNorm()
    if name == "layer":
        return LayerNorm(width)
    if name == "batch":
        return BatchNorm(width)
    raise unknown("norm", name, ("none", "layer", "batch"))
