// Numbering the distinct ids of a batch from 0, by a bitmap of all vertices: its ranks give ids in ascending order without
// a sort, and it takes N / 4 bytes, kept between calls, where a stamp for each vertex would take 4 N or more.
#pragma once

#include <cstdint>

namespace weft {

constexpr int64_t kWordIds = 64, kPageIds = 4096;  // ids of a word, and of a page: no call reads pages without an id

// 64 ids: which of them are there, and how many there are before them.
struct IdWord {
  uint64_t bits;
  uint64_t rank;
};

// Words [ceil(N / kWordIds)] and pages [ceil(N / kPageIds)]: whether there is anything on it. All zero between batches.
struct IdMap {
  IdWord* words;
  uint8_t* pages;
  int64_t num_ids;
};

// Puts ids on the map, and returns how many distinct ones there are. Throws std::invalid_argument, the map empty, where
// one is out of range.
template <class Index>
int64_t mark_ids(const IdMap& map, const int64_t* first, int64_t num_first, const Index* others, int64_t num_others,
                 int num_threads);

// After mark_ids of the same: positions[j] = where others[j] is in `first` and then `fresh`, which gets the ids that are
// not in `first`, ascending. `local` [num_distinct] is room for work. Clears the map. Throws std::invalid_argument where
// an id is twice in `first`.
template <class Index>
void place_ids(const IdMap& map, const int64_t* first, int64_t num_first, const Index* others, int64_t num_others,
               int64_t num_distinct, int32_t* local, int32_t* positions, int64_t* fresh, int num_threads);

}  // namespace weft
