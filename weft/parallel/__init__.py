"""Work on a graph chunk by chunk; knows no strategy.

schedule, rounds, ranges, sets and slots say which rows a round of chunks brings and leaves, and placed has rounds in
memory or files; aggregates runs them over rows, which tables hold and sources brings into slots. program is a model
that was cut, as tracer finds it with views, and flops counts its parts'; rank is what a rank does of both, which stages
say step by step; passes, segments and embedded run them over rows on the host (offload), and halos and order bring
those of other ranks as they are made (pipeline). Over columns of all rows (tensor), chunking cuts the graph to fit a
limit, exchange_plan says what crosses with which chunk, and columns feeds the rounds and drains them.
"""
