"""What runs on the GPU: kernels, and what they have in common. Names as in `docs/glossary.md`.

A program has a tile [R, K, C]: R segments (rows, or pieces of one), K of their entries at a time, C columns of one
head. Each of the K lanes adds up by itself, and the lanes are added at the end, so that the order of a sum depends on
the sizes alone. Columns are cut into blocks that each lie in one head; `blocks` int32 [B, 3] has head, first column and
end of each. ACC is the type of sums, OFFSET that of offsets into rows.
"""
