// The fewest rows between two parts. An edge from a vertex of another part into a target here is covered by the row of its
// source, or by the target's partial result over the other part's rows: a vertex cover of the bipartite graph of the edges
// between the two parts, which a maximum matching gives (Koenig 1931; Hopcroft and Karp 1973).
#pragma once

#include <cstdint>

namespace weft {

// taken [bounds[num_parts]]: for each source of another part, 1 where its row is in the least cover, 0 where its edges are
// left to partial results; these are of the targets that such edges lead to, one for each part and target.
// Rows `indptr` hold the sources of a target; those from `first` on belong to others, bounds [num_parts + 1] of them to each.
// Of all least covers it is the one with most source rows, so it is unique, and no partial result has a single edge.
template <class Index>
void least_cover(const int64_t* indptr, const Index* indices, int64_t num_targets, int64_t first, const int64_t* bounds,
                 int64_t num_parts, uint8_t* taken, int num_threads);

}  // namespace weft
