// Numbers the distinct ids of a batch from 0, by a bitmap over all vertices. The rank of a bit (the number of bits
// before it) gives ascending ids without a sort. The bitmap needs N / 4 bytes and is reused; a stamp for each vertex
// would need at least 4 N bytes.
#pragma once

#include <cstdint>

namespace weft {

constexpr int64_t kWordIds = 64, kPageIds = 4096;  // ids per word and per page; pages without an id are skipped

// The bits of 64 ids, and the number of marked ids before them.
struct IdWord {
  uint64_t bits;
  uint64_t rank;
};

// words [ceil(N / kWordIds)]; pages [ceil(N / kPageIds)]: whether the page has a marked id. All are zero between
// batches.
struct IdMap {
  IdWord* words;
  uint8_t* pages;
  int64_t num_ids;
};

// Marks ids and returns the number of distinct ones. If an id is out of range, clears the map and throws
// std::invalid_argument.
template <class Index>
int64_t mark_ids(const IdMap& map, const int64_t* first, int64_t num_first, const Index* others, int64_t num_others,
                 int num_threads);

// Call it after mark_ids with the same ids. Fills `fresh` with the ids of `others` that are not in `first`, ascending,
// and positions[j] with the position of others[j] in `first` followed by `fresh`. local [num_distinct] is a scratch
// array. Clears the map. Throws std::invalid_argument if an id is twice in `first`.
template <class Index>
void place_ids(const IdMap& map, const int64_t* first, int64_t num_first, const Index* others, int64_t num_others,
               int64_t num_distinct, int32_t* local, int32_t* positions, int64_t* fresh, int num_threads);

}  // namespace weft
