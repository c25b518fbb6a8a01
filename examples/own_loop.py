"""A custom training loop, on one rank or under torchrun: `torchrun --nproc-per-node 2 examples/own_loop.py`.

Two things differ from a loop on one GPU: `weft.place` distributes the model and the graph, and `placed` gives this
rank's part of the batches, the forward pass and the backward pass.
"""

import torch
from torch.nn.functional import cross_entropy

import weft

if __name__ == "__main__":
    graph = weft.load("digits")
    torch.manual_seed(0)
    model = weft.nn.SAGE(graph.num_features, out_width=graph.num_classes, hidden=32)
    with weft.place(graph, model, strategy="hybrid") as placed:
        optimizer = torch.optim.AdamW(placed.model.parameters(), lr=0.01)
        for epoch in range(30):
            for batch in placed.batches(epoch):  # a single batch, unless the strategy samples mini-batches
                optimizer.zero_grad()
                logits = placed(batch)  # for the vertices of this rank
                loss = cross_entropy(logits[batch.rows], batch.y, label_smoothing=0.1, reduction="sum") / batch.size
                placed.backward(loss)  # sums the parameters' gradients over the ranks
                optimizer.step()
        scores = placed.evaluate()
        all_logits = placed.gather(placed.logits())  # of all vertices on rank 0, None on other ranks
        if all_logits is not None:
            torch.save(placed.model.state_dict(), "own_loop.pt")
            print(f"test accuracy {scores['test_accuracy']:.3f}, {len(all_logits)} vertices")
