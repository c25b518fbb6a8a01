// Decides which chunks of the ranks run together, and in what order (HongTu, section 5.3).
#pragma once

#include <cstdint>

namespace weft {

// HongTu, algorithm 4. Vertex v is in the chunks members[starts[v]] up to members[starts[v + 1]], ascending; chunk c of
// rank r has the number r * num_chunks + c. Fills orders [num_ranks, num_chunks]: the j-th chunk that each rank runs.
template <class Index>
void reorder_chunks(const int64_t* starts, const Index* members, int64_t num_vertices, int64_t num_ranks,
                    int64_t num_chunks, int64_t* orders, int num_threads);

}  // namespace weft
