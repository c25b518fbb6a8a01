// The remote vertices that a part needs: which of them it recomputes (caches), and the block of edges on which its
// aggregates run (NeutronStar, sections 2.2 and 3). Hop h is the h-th aggregate of a model, and its inputs are the rows
// at level h. To recompute the row of a remote vertex at level h, the part needs all sources of the vertex at level
// h - 1.
#pragma once

#include <cstdint>

namespace weft {

// Columns of the cost table, which has a row for each level: seconds to compute a vertex's row with the dense layers,
// seconds per in-edge for the aggregate before them, seconds to fetch the row instead, and the bytes of a cached row
// and of each of its in-edges.
enum LevelCost { kRowSeconds, kEdgeSeconds, kFetchSeconds, kRowBytes, kEdgeBytes, kNumLevelCosts };

struct Caching {
  const double* costs;  // [num_levels, kNumLevelCosts]
  int64_t num_levels;
  int64_t first;     // the lowest level to decide: below it, every part has all rows
  double ratio;      // in [0, 1]: fraction of `wanted` to cache at each level; below 0: cache if it costs less
  double max_bytes;  // limit for all cached rows and edges; below 0: no limit
};

struct Cached {
  double bytes;
  bool limited;  // whether the memory limit stopped the algorithm
};

// Decides which remote vertices part `own` caches (NeutronStar, algorithm 4). Fills levels [num_vertices] with the
// highest level up to which each vertex is recomputed, -1 for none. `wanted` has the remote sources of the part.
//
// For each level, from the lowest:
// 1. Compute the cost of caching each wanted vertex: everything that has to be recomputed for it and is not cached yet.
//    A row on the way that would otherwise be fetched costs only the difference, but not less than 0.
// 2. Go through the vertices, the cheapest first. Compute the cost again, since other vertices have been cached
//    meanwhile, and cache the vertex if that costs less than fetching it.
//
// With a ratio, lower levels may get more than their fraction, since the vertices that higher levels need count as
// well.
template <class Index>
Cached cache_levels(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part, int32_t own,
                    const int64_t* wanted, int64_t num_wanted, const Caching& caching, int8_t* levels, int num_threads);

// Gathers the in-edges of the first `num_targets` vertices of `inputs`, in the order of the graph. Fills positions [E]
// with the position of each source among the inputs and, after these, the sources that are no inputs, ordered by part
// and id. The latter are written to fetched [num_vertices]. Returns their number. positions null: finds only the latter.
template <class Index>
int64_t gather_block(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part,
                     const int64_t* inputs, int64_t num_inputs, int64_t num_targets, Index* positions, int64_t* fetched);

}  // namespace weft
