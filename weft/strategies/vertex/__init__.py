"""Vertex parallelism (NeutronStar): a rank has vertices with all their in-edges, and fetches or recomputes the rest.

Reading order: plan (what a rank computes and fetches), costs (what decides that), blocks (the edges, and the exchange
of rows), setup (what ranks agree on first), embedded (trained rows), stale (old halos); weft.strategies.probe measures
the costs.
"""
