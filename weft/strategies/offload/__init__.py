"""Offload (HongTu): rows on the host, and chunks of the graph on the device one after the other.

Reading order: plan (the search for chunks), cutter (chunks and their order), memory_probe (device memory of a chunk),
moves (the trace), estimate, placed (what runs). weft.parallel has the program, the stages of a pass over it, the pass
and the aggregates.
"""
