"""Normalizations of hidden rows. They are called with the view, since a batch norm needs the rows of all ranks."""

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
    """Identity, for a model without normalization."""

    def forward(self, _view: View, x: Tensor) -> Tensor:
        return x


class LayerNorm(nn.Module):
    """Normalization of each row to mean 0 and variance 1, with learned scale and shift (Ba, Kiros, Hinton 2016).

    Called as `norm(view, x)`, with rows x [n, width].

    Args:
        width: Number of columns.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, _view: View, x: Tensor) -> Tensor:
        return apply_rowwise(self._normalize, [x], [self.norm.weight, self.norm.bias])

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, self.norm.normalized_shape, weight, bias, self.norm.eps)


class BatchNorm(PhasedLayer):
    """Normalization of each column to mean 0 and variance 1 over the vertices of all ranks (Ioffe and Szegedy 2015).

    Called as `norm(view, x)`, with rows x [n, width]. Give the layer before it no bias: the result does not depend on
    that bias, so its gradient is only rounding noise. Adam scales this up to full steps, which differ between
    strategies.

    Args:
        width: Number of columns.
        momentum: Weight of the current statistics in the running ones.
        eps: Number added to the variance.
    """

    running_mean: Tensor
    """Running mean [width], used in evaluation."""
    running_var: Tensor
    """Running variance [width], unbiased, used in evaluation."""
    num_batches_tracked: Tensor
    """Number of training steps so far, int64."""

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
        """Return a batch norm that shares the parameters and statistics of PyTorch's `norm`.

        Raises:
            InputError: `norm` has no weights, running statistics or momentum.
        """
        if not (norm.affine and norm.track_running_stats and norm.momentum is not None):
            raise InputError(
                f"{norm} has no weights, running statistics or momentum: create it with affine=True, "
                "track_running_stats=True and a momentum"
            )
        result = cls(norm.num_features, momentum=norm.momentum, eps=norm.eps)
        result.weight, result.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(result, name, buffer)
        return result

    def begin(self, view: View, x: Tensor) -> Boundary | Tensor:
        del view
        if not self.training:
            return self.normalize(x, self.running_mean, self.running_var)
        return Boundary(request=Request(Total(), {"x": x}), rows={"x": x})

    def resume(self, view: View, state: BoundaryState) -> Boundary | Tensor:
        # 1. After the total of the rows: compute the mean, and request the total of the squared distances from it.
        # 2. After that: normalize. Of these two states, only the second has a mean.
        x, count = state.rows["x"], view.num_vertices
        if "mean" in state.shared:
            return self.normalize(x, state.shared["mean"], state.result / count)
        mean = state.result / count
        on_result = partial(self.update_running_stats, mean.detach(), count)
        squares = Request(Total(), {"x": apply_rowwise(_squares, [x], [mean])})
        return Boundary(request=squares, rows={"x": x}, shared={"mean": mean}, on_result=on_result)

    @torch.no_grad()
    def update_running_stats(self, mean: Tensor, count: int | Tensor, squares: Tensor) -> None:
        """Update the running statistics with the mean and the variance of a training step.

        Args:
            mean: Mean of each column, [F].
            count: Number of vertices; a tensor without dimensions if only the ranks together know it.
            squares: Sum of the squared distances from the mean, [F].
        """
        self.running_mean.lerp_(mean, self.momentum)
        divisor = max(count - 1, 1) if isinstance(count, int) else (count - 1).clamp(min=1)
        self.running_var.lerp_(squares / divisor, self.momentum)  # unbiased, like PyTorch
        self.num_batches_tracked += 1

    def normalize(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Return rows normalized by given statistics.

        Args:
            x: Rows [n, F].
            mean: Mean of each column, [F].
            var: Variance of each column, [F].
        """
        return apply_rowwise(self._normalize, [x], [mean, var, self.weight, self.bias])

    def _normalize(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (x - mean) * (var + self.eps).rsqrt() * weight + bias


def _squares(x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean).square()


def make_norm(name: str, width: int) -> nn.Module:
    """Return a normalization layer.

    Args:
        name: 'none', 'layer' or 'batch'.
        width: Number of columns of the rows.

    Raises:
        InputError: `name` is another word.
    """
    if name == "none":
        return NoNorm()
    if name == "layer":
        return LayerNorm(width)
    if name == "batch":
        return BatchNorm(width)
    raise unknown("norm", name, ("none", "layer", "batch"))
