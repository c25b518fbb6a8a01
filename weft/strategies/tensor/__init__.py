"""Tensor parallelism (NeutronTP): ranks have rows for dense layers, and columns of all rows for aggregates.

Reading order: plan (what a rank stores), column_exchange (the exchange around an aggregate), attention_columns (how
attention heads are assigned to ranks), pruned_exchange (the exchange of steps on a receptive field). weft.comm.columns
turns rows into columns and back, weft.parallel.columns.column_pass aggregates chunk by chunk.
"""
