// The smallest number of rows to send between two parts (partial aggregation by minimum vertex cover). For each edge
// from another part, that part sends either the row of the source, or a partial sum for the target over its own rows.
// The choice is a vertex cover of the bipartite graph of these edges; a maximum matching gives the smallest one (Koenig
// 1931; Hopcroft and Karp 1973).
#pragma once

#include <cstdint>

namespace weft {

// Fills taken [bounds[num_parts]] with a flag for each source of another part: 1 if its row is sent, 0 if partial sums
// cover its edges. For each part, every target of an edge from a source with 0 gets one partial sum.
//
// Row v of indptr and indices has the sources of target v. Sources from `first` on belong to other parts: part p owns
// first + bounds[p] up to first + bounds[p + 1].
//
// Of all minimum covers, this is the one with the most source rows. It is therefore unique, and no partial sum has only
// one edge.
template <class Index>
void least_cover(const int64_t* indptr, const Index* indices, int64_t num_targets, int64_t first, const int64_t* bounds,
                 int64_t num_parts, uint8_t* taken, int num_threads);

}  // namespace weft
