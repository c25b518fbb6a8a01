"""Tensor parallelism (NeutronTP): rows for the maps, columns of all rows for the aggregates.

Reading order: plan (the view and the strategy), attention (how heads are assigned to ranks); weft.comm.exchange has the
exchange of rows and columns, weft.chunks.columns the aggregates chunk by chunk.
"""
