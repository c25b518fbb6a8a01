// The remote vertices that a part needs: which of them it computes again, and the block that its products run on
// (NeutronStar, sections 2.2 and 3). Hop h is the h-th product of a model; its inputs are the rows of level h. A remote
// vertex of level h is computed again up to its row of level h, for which all its sources must be there at level h - 1.
#pragma once

#include <cstdint>

namespace weft {

// What a level costs, one row a level: seconds for the row's maps, seconds an in-edge for the product before them, seconds
// to fetch the row instead, and the bytes that a cached row, and each of its in-edges, takes.
enum LevelCost { kRowSeconds, kEdgeSeconds, kFetchSeconds, kRowBytes, kEdgeBytes, kNumLevelCosts };

struct Caching {
  const double* costs;  // [num_levels, kNumLevelCosts]
  int64_t num_levels;
  int64_t first;     // the lowest level that rows have: below it, all are at hand
  double ratio;      // in [0, 1]: this share of `wanted` at each level, the cheapest; below 0: where it costs less
  double max_bytes;  // of all that is cached; below 0: no limit
};

struct Cached {
  double bytes;
  bool limited;  // whether the limit ended the choice
};

// NeutronStar's algorithm 4, for the part `own`: fills levels [num_vertices] with the highest level up to which each
// vertex is computed again, -1 for none. `wanted`: the part's remote sources. Level by level, each is taken where all that
// it would add costs less than fetching it, the cheapest first, measured again as others are taken; what is cached
// already is not paid twice, and a row of the way that would otherwise be fetched is paid by the difference, at least 0.
// With a ratio, lower levels may get more than their share, since what higher ones need counts there as well.
template <class Index>
Cached cache_levels(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part, int32_t own,
                    const int64_t* wanted, int64_t num_wanted, const Caching& caching, int8_t* levels, int num_threads);

// The in-edges of the first `num_targets` of `inputs`, in the graph's order, with sources by position: inputs first, then
// those that are none, by part and id, which `fetched` [num_vertices] gets. Returns how many.
template <class Index>
int64_t gather_block(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part,
                     const int64_t* inputs, int64_t num_inputs, int64_t num_targets, Index* positions, int64_t* fetched);

}  // namespace weft
