"""Mini-batch strategies: a step trains vertices or links on sampled neighbourhoods. Samples do not depend on the ranks.

`split` (GSplit) splits one mini-batch among the ranks by the owner of each vertex, so that no vertex is sampled, loaded
or computed twice. `sampled` (data parallelism) gives each rank a micro-batch of its own, which overlaps with those of
other ranks. Reading order: sampler (what a batch is), batch_blocks (a batch on its rank), plan, step_trace,
pre_sampling and feature_cache, read_ahead (batches prepared in advance).
"""
