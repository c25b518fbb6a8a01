// Builds and transposes graphs in CSR form. Results do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace weft {

// Entry e goes from column cols[e] into row rows[e]. Fills indptr [num_rows + 1], indices [E] and edge_ids [E], ordered
// by (row, column, position in the input). Throws std::invalid_argument if an id is out of range.
template <class In, class Index, class Id>
void coo_to_csr(const In* rows, const In* cols, int64_t num_edges, int64_t num_rows, int64_t num_cols, int64_t* indptr,
                Index* indices, Id* edge_ids, int num_threads);

// Fills indptr_t [num_cols + 1], indices_t [E] (rows, ascending) and edge_ids [E] (positions in `indices`).
template <class In, class Index, class Id>
void transpose(const int64_t* indptr, const In* indices, int64_t num_rows, int64_t num_cols, int64_t* indptr_t,
               Index* indices_t, Id* edge_ids, int num_threads);

// found[v] = whether row v holds column v; columns must ascend in each row.
template <class Index>
void find_loops(const int64_t* indptr, const Index* indices, int64_t num_rows, bool* found, int num_threads);

// Fills order [num_vertices] by breadth-first search over edges in both directions. Each search begins with the first
// vertex of `starts` that is not in the order yet; `starts` contains every vertex. A vertex's in-neighbours come before
// its out-neighbours, each in the order of the rows.
template <class Index>
void breadth_first(const int64_t* indptr, const Index* indices, const int64_t* indptr_t, const Index* indices_t,
                   const int64_t* starts, int64_t num_vertices, int64_t* order);

}  // namespace weft
