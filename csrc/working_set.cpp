#include "working_set.h"

#include <algorithm>
#include <vector>

namespace weft {

template <class Index>
int64_t cut_rows(const int64_t* indptr, const Index* indices, int64_t num_rows, int64_t num_columns,
                 const WorkingSet& set, int64_t limit, int64_t* bounds, int64_t& most) {
  std::vector<int64_t> seen(num_columns, -1);  // the last range that contains the column
  int64_t num_bounds = 0, columns = 0, taken = 0;
  most = 0;
  const auto add = [&](int64_t row, int64_t range) {
    const auto mark = [&](int64_t column) {
      columns += seen[column] != range;
      seen[column] = range;
    };
    if (set.own) mark(row);
    for (int64_t entry = indptr[row]; entry < indptr[row + 1]; ++entry) mark(indices[entry]);
  };
  bounds[num_bounds++] = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t first = bounds[num_bounds - 1];
    add(row, num_bounds);
    int64_t bytes = set.bytes(row + 1 - first, columns, indptr[row + 1] - indptr[first]);
    if (bytes > limit && row > first) {
      most = std::max(most, taken);
      bounds[num_bounds++] = row;
      columns = 0;
      add(row, num_bounds);
      bytes = set.bytes(1, columns, indptr[row + 1] - indptr[row]);
    }
    taken = bytes;
  }
  most = std::max(most, taken);
  if (num_rows > 0) bounds[num_bounds++] = num_rows;
  return num_bounds;
}

template <class T>
void add_rows(const int64_t* rows, int64_t num_rows, const T* added, int64_t width, T* target, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t i = 0; i < num_rows; ++i) {
    T* to = target + rows[i] * width;
    const T* from = added + i * width;
    for (int64_t column = 0; column < width; ++column) to[column] += from[column];
  }
}

#define WEFT_INSTANTIATE(Index)                                                                                        \
  template int64_t cut_rows(const int64_t*, const Index*, int64_t, int64_t, const WorkingSet&, int64_t, int64_t*, \
                            int64_t&);
WEFT_INSTANTIATE(int32_t)
WEFT_INSTANTIATE(int64_t)
template void add_rows(const int64_t*, int64_t, const float*, int64_t, float*, int);
template void add_rows(const int64_t*, int64_t, const double*, int64_t, double*, int);

}  // namespace weft
