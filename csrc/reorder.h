// Which chunks run together, and in what order (HongTu, section 5.3).
#pragma once

#include <cstdint>

namespace weft {

// HongTu's algorithm 4. Vertex v is in the chunks members[starts[v]] to members[starts[v + 1]], ascending, where chunk
// c of rank r has the number r * num_chunks + c. Fills orders [num_ranks, num_chunks]: the chunk that runs j-th.
template <class Index>
void reorder_chunks(const int64_t* starts, const Index* members, int64_t num_vertices, int64_t num_ranks,
                    int64_t num_chunks, int64_t* orders, int num_threads);

}  // namespace weft
