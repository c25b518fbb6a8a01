// Divides rows into ranges whose working sets fit a memory limit (NeutronTP, section 4.2.1).
#pragma once

#include <cstdint>

namespace weft {

// Bytes of a range of rows with all its entries: terms for rows, distinct columns and entries.
struct WorkingSet {
  int64_t per_row, per_column, per_entry;
  bool own;  // whether each row is also a column that is read, as for self-loops

  int64_t bytes(int64_t rows, int64_t columns, int64_t entries) const {
    return per_row * rows + per_column * columns + per_entry * entries;
  }
};

// Fills bounds [at most num_rows + 1] of contiguous ranges, each as long as the limit allows; a row that exceeds the
// limit is a range by itself. Returns the number of bounds, and in `most` the bytes of the largest range.
template <class Index>
int64_t cut_rows(const int64_t* indptr, const Index* indices, int64_t num_rows, int64_t num_columns,
                 const WorkingSet& set, int64_t limit, int64_t* bounds, int64_t& most);

// target[rows[i]] += added[i] for rows of `width` numbers; rows are distinct.
template <class T>
void add_rows(const int64_t* rows, int64_t num_rows, const T* added, int64_t width, T* target, int num_threads);

}  // namespace weft
