"""Triton kernels, which run on the GPU, and their common functions. Shapes use the letters of `docs/glossary.md`.

A program processes a tile [R, K, C]: R segments (rows, or pieces of a row), K entries of each at a time, C columns of
one head. Each of the K lanes sums its entries, and the lanes are added at the end, so the order of a sum depends only
on sizes. Columns are cut into blocks that each lie in one head.
"""
