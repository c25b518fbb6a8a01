"""Work on a graph chunk by chunk; knows no strategy.

bounds cuts a graph; schedule, ranges, sets and slots say which rows a round of chunks brings and leaves; program is a
model that was cut, as tracer finds it with views, and flops counts its parts'; rank is what a rank does of both, and
placed has it in memory or files; passes, aggregates, tables and embedded run it over rows on the host (offload), and
halos and order bring those of other ranks as they are made (pipeline). chunking, columns and exchange_plan make
aggregates over columns of all rows (tensor).
"""
