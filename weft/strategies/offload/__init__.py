"""Offload (HongTu): rows on the host, chunks of the graph on the device in turn.

Reading order: run (the strategy), plan (chunks, and what is kept), miniature (the memory of a chunk), moves (the
trace), forecast, rates; weft.chunks has the program, the pass over it and the products.
"""
