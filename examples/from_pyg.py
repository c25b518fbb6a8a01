"""Train on a PyG graph with tensor parallelism, then use the trained weights in the model."""

import torch
from torch_geometric.data import Data

import weft

if __name__ == "__main__":
    random = torch.Generator().manual_seed(0)
    y = torch.arange(600) % 4
    edges = torch.randint(0, 600, (2, 6000), generator=random)
    same_class = y[edges[0]] == y[edges[1]]
    edges = edges[:, same_class | (torch.rand(6000, generator=random) < 0.2)]  # neighbours mostly share a class
    train_mask = torch.rand(600, generator=random) < 0.3
    x = torch.randn(600, 16, generator=random) + torch.nn.functional.one_hot(y, 16)
    data = Data(x=x, edge_index=edges, y=y, train_mask=train_mask, val_mask=~train_mask)
    data.test_mask = data.val_mask

    graph = weft.Graph.from_pyg(data)
    model = weft.nn.SAGE(graph.num_features, out_width=graph.num_classes, hidden=32)
    run = weft.train(graph, model, strategy="tensor", workers=2, epochs=50)

    view = weft.nn.GraphView.of(graph.in_edges)
    model.eval()
    with torch.no_grad():
        predicted = model([view, view], graph.x).argmax(1)
    accuracy = (predicted == y)[~train_mask].float().mean().item()
    print(f"test accuracy of the run {run.summary['test_accuracy']:.4f}, of the model {accuracy:.4f}")
