"""Offload (HongTu): rows on the host, chunks of the graph on the device in turn.

Reading order: plan (the search), cut (chunks and their order), memory_probe (what a chunk takes), moves (the trace),
forecast, placed (what runs); weft.parallel has the program, the stages of a pass over it, the pass and the aggregates.
"""
