"""Building blocks of all strategies, which depend on none: exchanges, blocks, and execution chunk by chunk.

- `layout` states which rows and edges each rank has in a type of step; trace and memory of the step follow from it.
- `exchange` is the view of a layer on a rank, and the exchange that brings rows to its edges.
- `operations` has operations of a trace that several strategies have.
- `blocks` are the in-edges of a rank, and the rows that it fetches for them (vertex parallelism).
- `chunks.cut` divides a rank's targets into chunks and plans which rows stay on the device between them (residency).
- `chunks.program` traces a model and cuts it into segments at its aggregates; a pass is compiled into stages.
- `chunks.run` executes a pass: rows on the host, rounds, aggregates, and the rows that ranks exchange. `offload` runs
  segment by segment; `pipeline` runs each chunk as soon as its rows have arrived.
- `columns` runs the rounds on this rank's columns of all rows (`tensor`).
"""
