#include "graph.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace weft {
namespace {

// The number of parts of the input: one for each thread, but fewer if all counters would exceed the size of the result.
int num_parts(int64_t num_keys, int64_t num_buckets, int num_threads) {
  const int64_t affordable = num_keys / std::max<int64_t>(num_buckets, 1);
  return static_cast<int>(std::clamp<int64_t>(affordable, 1, num_threads));
}

// A stable counting sort, which fills indptr and finds the slot of each entry:
//
// 1. Each part of the input counts its entries by bucket.
// 2. A prefix sum over buckets and parts gives the first slot of every part in every bucket.
// 3. Each part calls emit(slot, entry...) for its entries.
//
// stream(begin, end, visit) calls visit(bucket, entry...) for the entries of a range, in order.
template <class Count, class Stream, class Emit>
void counting_sort(int64_t num_entries, int64_t num_buckets, int64_t* indptr, int num_threads, Stream stream,
                   Emit emit) {
  const int parts = num_parts(num_entries, num_buckets, num_threads);
  std::unique_ptr<Count[]> next(new Count[static_cast<size_t>(parts) * num_buckets]);
  bool in_range = true;

#pragma omp parallel for num_threads(parts) schedule(static, 1) reduction(&& : in_range)
  for (int part = 0; part < parts; ++part) {
    Count* count = next.get() + part * num_buckets;
    std::fill_n(count, num_buckets, Count{0});
    stream(num_entries * part / parts, num_entries * (part + 1) / parts, [&](int64_t bucket, auto...) {
      if (static_cast<uint64_t>(bucket) < static_cast<uint64_t>(num_buckets)) {
        ++count[bucket];
      } else {
        in_range = false;
      }
    });
  }
  if (!in_range) throw std::invalid_argument("an edge has a target outside [0, " + std::to_string(num_buckets) + ")");

  indptr[0] = 0;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    int64_t slot = indptr[bucket];
    for (int part = 0; part < parts; ++part) {
      Count& first = next[part * num_buckets + bucket];
      const int64_t count = first;
      first = static_cast<Count>(slot);
      slot += count;
    }
    indptr[bucket + 1] = slot;
  }

#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; ++part) {
    Count* slot = next.get() + part * num_buckets;
    stream(num_entries * part / parts, num_entries * (part + 1) / parts,
           [&](int64_t bucket, auto... entry) { emit(int64_t{slot[bucket]++}, entry...); });
  }
}

// An entry as a sortable key: the column, then the position, which makes all keys different.
template <class Index, class Id>
struct Packing {
  using Key = std::pair<Index, Id>;
  static Key pack(Index index, Id id) { return {index, id}; }
  static Index index(const Key& key) { return key.first; }
  static Id id(const Key& key) { return key.second; }
};

template <>
struct Packing<int32_t, int32_t> {
  using Key = uint64_t;
  static Key pack(int32_t index, int32_t id) { return static_cast<uint64_t>(index) << 32 | static_cast<uint32_t>(id); }
  static int32_t index(Key key) { return static_cast<int32_t>(key >> 32); }
  static int32_t id(Key key) { return static_cast<int32_t>(key); }
};

template <class Index, class Id>
void sort_rows(const int64_t* indptr, int64_t num_rows, Index* indices, Id* edge_ids, int num_threads) {
  using Pack = Packing<Index, Id>;
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<typename Pack::Key> keys;
#pragma omp for schedule(dynamic, 256)
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t begin = indptr[row], end = indptr[row + 1];
      if (std::is_sorted(indices + begin, indices + end)) continue;
      keys.clear();
      for (int64_t entry = begin; entry < end; ++entry) keys.push_back(Pack::pack(indices[entry], edge_ids[entry]));
      std::sort(keys.begin(), keys.end());
      for (int64_t entry = begin; entry < end; ++entry) {
        indices[entry] = Pack::index(keys[entry - begin]);
        edge_ids[entry] = Pack::id(keys[entry - begin]);
      }
    }
  }
}

}  // namespace

template <class In, class Index, class Id>
void coo_to_csr(const In* rows, const In* cols, int64_t num_edges, int64_t num_rows, int64_t num_cols, int64_t* indptr,
                Index* indices, Id* edge_ids, int num_threads) {
  bool in_range = true;
#pragma omp parallel for num_threads(num_threads) reduction(&& : in_range)
  for (int64_t edge = 0; edge < num_edges; ++edge) {
    in_range = in_range && static_cast<uint64_t>(cols[edge]) < static_cast<uint64_t>(num_cols);
  }
  if (!in_range) throw std::invalid_argument("an edge has a source outside [0, " + std::to_string(num_cols) + ")");

  counting_sort<Id>(
      num_edges, num_rows, indptr, num_threads,
      [=](int64_t begin, int64_t end, auto visit) {
        for (int64_t edge = begin; edge < end; ++edge) visit(rows[edge], edge);
      },
      [=](int64_t slot, int64_t edge) {
        indices[slot] = static_cast<Index>(cols[edge]);
        edge_ids[slot] = static_cast<Id>(edge);
      });
  sort_rows(indptr, num_rows, indices, edge_ids, num_threads);
}

template <class In, class Index, class Id>
void transpose(const int64_t* indptr, const In* indices, int64_t num_rows, int64_t num_cols, int64_t* indptr_t,
               Index* indices_t, Id* edge_ids, int num_threads) {
  counting_sort<Id>(
      indptr[num_rows], num_cols, indptr_t, num_threads,
      [=](int64_t begin, int64_t end, auto visit) {
        if (begin == end) return;
        int64_t row = std::upper_bound(indptr, indptr + num_rows + 1, begin) - indptr - 1;
        for (int64_t entry = begin; entry < end; ++entry) {
          while (indptr[row + 1] <= entry) ++row;
          visit(indices[entry], entry, row);
        }
      },
      [=](int64_t slot, int64_t entry, int64_t row) {
        indices_t[slot] = static_cast<Index>(row);
        edge_ids[slot] = static_cast<Id>(entry);
      });
}

template <class Index>
void find_loops(const int64_t* indptr, const Index* indices, int64_t num_rows, bool* found, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    found[row] = std::binary_search(indices + indptr[row], indices + indptr[row + 1], static_cast<Index>(row));
  }
}

template <class Index>
void breadth_first(const int64_t* indptr, const Index* indices, const int64_t* indptr_t, const Index* indices_t,
                   const int64_t* starts, int64_t num_vertices, int64_t* order) {
  std::vector<bool> seen(num_vertices);  // a bit per vertex, which stays in the cache: it is read for every edge
  int64_t num_seen = 0, num_done = 0;    // `order` is also the queue
  const auto see = [&](int64_t vertex) {
    if (seen[vertex]) return;
    seen[vertex] = true;
    order[num_seen++] = vertex;
  };
  for (int64_t start = 0; start < num_vertices; ++start) {
    see(starts[start]);
    while (num_done < num_seen) {
      const int64_t vertex = order[num_done++];
      for (int64_t entry = indptr[vertex]; entry < indptr[vertex + 1]; ++entry) see(indices[entry]);
      for (int64_t entry = indptr_t[vertex]; entry < indptr_t[vertex + 1]; ++entry) see(indices_t[entry]);
    }
  }
}

#define WEFT_INSTANTIATE(In, Index, Id)                                                                  \
  template void coo_to_csr(const In*, const In*, int64_t, int64_t, int64_t, int64_t*, Index*, Id*, int); \
  template void transpose(const int64_t*, const In*, int64_t, int64_t, int64_t*, Index*, Id*, int);
WEFT_INSTANTIATE(int32_t, int32_t, int32_t)
WEFT_INSTANTIATE(int32_t, int32_t, int64_t)
WEFT_INSTANTIATE(int32_t, int64_t, int32_t)
WEFT_INSTANTIATE(int32_t, int64_t, int64_t)
WEFT_INSTANTIATE(int64_t, int32_t, int32_t)
WEFT_INSTANTIATE(int64_t, int32_t, int64_t)
WEFT_INSTANTIATE(int64_t, int64_t, int32_t)
WEFT_INSTANTIATE(int64_t, int64_t, int64_t)
template void find_loops(const int64_t*, const int32_t*, int64_t, bool*, int);
template void find_loops(const int64_t*, const int64_t*, int64_t, bool*, int);
template void breadth_first(const int64_t*, const int32_t*, const int64_t*, const int32_t*, const int64_t*, int64_t,
                            int64_t*);
template void breadth_first(const int64_t*, const int64_t*, const int64_t*, const int64_t*, const int64_t*, int64_t,
                            int64_t*);

}  // namespace weft
