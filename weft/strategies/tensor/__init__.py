"""Tensor parallelism (NeutronTP): rows for the maps, columns of all rows for the aggregates.

Reading order: plan (what a rank has), columns (the exchange around an aggregate), attention (how heads are assigned to
ranks); weft.comm.columns turns rows into columns and back, weft.parallel.columns.column_pass aggregates chunk by chunk.
"""
