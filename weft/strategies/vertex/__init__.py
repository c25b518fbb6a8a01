"""Vertex parallelism (NeutronStar): a rank has vertices with all their in-edges, and fetches or recomputes other rows.

Reading order: plan (what a rank computes and fetches), costs (the cost model behind that decision), blocks (the edges,
and the exchange of rows), setup (how ranks agree on routes), embedding_rows (trained rows), stale (old halos).
"""
