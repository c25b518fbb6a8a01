"""Vertex parallelism (NeutronStar): a rank has vertices with all their in-edges, and fetches or recomputes the rest.

Reading order: plan (what a rank computes and fetches), costs and probe (at what cost), blocks (the edges, and the view
of them), embedded (trained rows), stale (old halos).
"""
