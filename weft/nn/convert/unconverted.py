"""PyG models that run as they are, on a rank that stores the whole graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.nn.aggregate.aggregate import Request, WholeLayer
from weft.nn.convert.traced_model import has_views
from weft.nn.convert.tracing import call_pyg
from weft.nn.graph_view import GraphView
from weft.nn.layers.phases import Boundary, BoundaryState, PhasedModel
from weft.nn.layers.pyg_conv import share_tensors
from weft.utils.errors import InputError


class Unconverted(PhasedModel):
    """PyG model that is called once in a forward pass, with all rows and edges. Only `single` can run it.

    Args:
        model: The model, whose parameters keep their names.
        edge_inputs: Optional arguments of its forward that the graph has.
        out_width: Number of columns of its result.
    """

    num_stages = 1
    layer: WholeModel
    """The layer that calls the model."""

    def __init__(self, model: nn.Module, edge_inputs: frozenset[str], out_width: int) -> None:
        super().__init__()
        refuse_parameter_hooks(model)
        self.__dict__["layer"] = WholeModel(model, edge_inputs, out_width)
        share_tensors(self, model)

    def train(self, mode: bool = True) -> Unconverted:
        self.layer.train(mode)
        self.training = mode
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits for views and rows, or the model's result for its arguments."""
        return super().__call__(*args, **kwargs) if has_views(args, kwargs) else self.layer.model(*args, **kwargs)

    def begin(self, views: Any, x: Tensor) -> Boundary:
        del views
        return Boundary(request=Request(WholeLayer(self.layer), {"x": x, "own": x}))

    def resume(self, views: Any, state: BoundaryState) -> Tensor:
        del views
        return state.result


def refuse_parameter_hooks(model: nn.Module) -> None:
    """Raise InputError if a parameter has hooks, which copies of the model do not have."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"{type(model).__name__}: {name} has a hook, which copies of the model lose: change the gradient in "
                "the optimizer, or scale the parameter in forward"
            )


class WholeModel(nn.Module):
    """Layer that calls a PyG model with the rows and edges of a view.

    PyTorch's random numbers, by which the model's dropout is drawn, depend on the view's key alone, so that a run can
    be repeated and resumed. Arguments are those of `Unconverted`.
    """

    model: nn.Module
    """The model."""
    cost_key = "whole model"
    """Key of its cost within an `Unconverted`, see `PyGConv.cost_key`."""

    def __init__(self, model: nn.Module, edge_inputs: frozenset[str], out_width: int) -> None:
        super().__init__()
        self.__dict__["model"] = model
        share_tensors(self, model)
        self.edge_inputs, self.out_width = edge_inputs, out_width

    def train(self, mode: bool = True) -> WholeModel:
        self.model.train(mode)
        self.training = mode
        return self

    def result_width(self, x: Tensor) -> int:
        """Return the number of columns of the result. `x`: its rows."""
        del x
        return self.out_width

    def tensors_read(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors on which the result depends. `x`: its rows, which come first."""
        return (x, *self.parameters())

    def without_data(self, rows: Tensor) -> Tensor:
        """Return a result on the meta device, which depends on all tensors that the model reads. `rows`: its rows."""
        result = rows @ rows.new_empty(rows.shape[1], self.out_width)
        return result + sum(tensor.sum() for tensor in self.tensors_read(rows))

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        rows, edge_index, _ = view.block(x)
        weight, features = view.edge_weight, view.edge_features
        if rows.device.type == "meta":  # the model may read values, which meta tensors do not have
            return self.without_data(rows)
        mask_key = view.mask_key(0.5)  # any probability
        assert mask_key is not None
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            torch.manual_seed(int(mask_key.key) >> 1)
            y = call_pyg(self.model, self.edge_inputs, rows, edge_index, weight, features, view.edge_type)
        if not isinstance(y, Tensor) or y.shape != (len(rows), self.out_width):
            what = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise InputError(
                f"{type(self.model).__name__} returns {what}: return one tensor [{len(rows)}, {self.out_width}], with "
                "a row for each vertex"
            )
        return y
