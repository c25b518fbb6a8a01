"""Mini-batches: a step trains vertices or links on samples of their neighbourhoods, drawn by keys and not by ranks.

`split` (GSplit): one mini-batch is split among the ranks by who owns a vertex, so none is drawn, loaded or computed
twice. `sampled` (data parallelism): each rank has its own micro-batch, which overlaps with those of others. Reading
order: sampler.py (what a batch is), batch.py (a batch on its rank), plan.py, loader.py (batches made ahead).
"""
