"""A custom layer: written for one device, run on two ranks.

The layer has three phases: a linear transform of each row, an aggregate over in-edges through the view, and a gate for
each row. The code does not depend on the rank.
"""

import torch
from torch import Tensor, nn

import weft


class GatedMean(nn.Module):
    """y_v = g_v * mean of N(v) W + (1 - g_v) * x_v W, with the gate g_v = sigmoid(x_v U)."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.out_width = out_width
        self.map = nn.Linear(in_width, out_width)
        self.gate = nn.Linear(in_width, out_width)

    def forward(self, view: weft.nn.View, x: Tensor) -> Tensor:
        h = self.map(x)
        gate = torch.sigmoid(self.gate(x))
        return gate * view.propagate(h, reduce="mean") + (1 - gate) * view.targets(h)


if __name__ == "__main__":
    graph = weft.load("digits")
    torch.manual_seed(0)
    layers = [GatedMean(graph.num_features, 32), GatedMean(32, graph.num_classes)]
    model = weft.nn.Stack(layers, dropout=0.5, norm="layer")
    run = weft.train(graph, model, strategy="tensor", workers=2, epochs=60)
    print(f"test accuracy {run.summary['test_accuracy']:.3f}, records in {run.folder}")
