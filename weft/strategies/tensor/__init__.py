"""Tensor parallelism (NeutronTP): rows for the maps, columns of all rows for the aggregates.

Reading order: plan (what a rank has), columns (the exchange around an aggregate), attention (how heads are assigned to
ranks); weft.comm.exchange turns rows into columns and back, weft.chunks.columns aggregates chunk by chunk.
"""
