#include "relabel.h"

#include <algorithm>
#include <stdexcept>

namespace weft {
namespace {

constexpr int64_t kAhead = 16;   // distance of prefetched words, in ids
constexpr int64_t kChunk = 128;  // ids whose positions are prefetched together

// The number of set bits, without the popcnt instruction, which old processors lack.
int64_t num_bits(uint64_t bits) {
  bits -= bits >> 1 & 0x5555555555555555u;
  bits = (bits & 0x3333333333333333u) + (bits >> 2 & 0x3333333333333333u);
  bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
  return static_cast<int64_t>((bits * 0x0101010101010101u) >> 56);
}

int64_t rank_of(const IdMap& map, int64_t id) {
  const IdWord& word = map.words[id / kWordIds];
  return static_cast<int64_t>(word.rank) + num_bits(word.bits & ((uint64_t{1} << (id % kWordIds)) - 1));
}

template <bool kShared>
void set(const IdMap& map, int64_t id) {
  uint64_t& bits = map.words[id / kWordIds].bits;
  uint8_t& page = map.pages[id / kPageIds];
  const uint64_t bit = uint64_t{1} << (id % kWordIds);
  if (!kShared) {
    bits |= bit;
    page = 1;
  } else if ((__atomic_load_n(&bits, __ATOMIC_RELAXED) & bit) == 0) {
    __atomic_fetch_or(&bits, bit, __ATOMIC_RELAXED);
    __atomic_store_n(&page, 1, __ATOMIC_RELAXED);
  }
}

template <bool kShared, class Id>
bool mark(const IdMap& map, const Id* ids, int64_t count, int num_threads) {
  bool in_range = true;
#pragma omp parallel for schedule(static) num_threads(num_threads) reduction(&& : in_range)
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(map.words + ids[i + kAhead] / kWordIds, 1);
    if (ids[i] >= 0 && ids[i] < map.num_ids) {
      set<kShared>(map, ids[i]);
    } else {
      in_range = false;
    }
  }
  return in_range;
}

// Calls visit(word, number) for the words of all pages with an id, in order.
template <class Visit>
void for_words(const IdMap& map, Visit visit) {
  const int64_t num_words = (map.num_ids + kWordIds - 1) / kWordIds;
  constexpr int64_t kPageWords = kPageIds / kWordIds;
  for (int64_t page = 0; page * kPageWords < num_words; ++page) {
    if (!map.pages[page]) continue;
    const int64_t end = std::min((page + 1) * kPageWords, num_words);
    for (int64_t number = page * kPageWords; number < end; ++number) visit(map.words[number], number);
  }
}

void clear(const IdMap& map) {
  for_words(map, [](IdWord& word, int64_t) { word.bits = 0; });
  std::fill_n(map.pages, (map.num_ids + kPageIds - 1) / kPageIds, uint8_t{0});
}

}  // namespace

template <class Index>
int64_t mark_ids(const IdMap& map, const int64_t* first, int64_t num_first, const Index* others, int64_t num_others,
                 int num_threads) {
  const bool in_range = num_threads == 1
                            ? mark<false>(map, first, num_first, 1) & mark<false>(map, others, num_others, 1)
                            : mark<true>(map, first, num_first, num_threads) & mark<true>(map, others, num_others, num_threads);
  if (!in_range) {
    clear(map);
    throw std::invalid_argument("an id is not a vertex of the graph");
  }
  int64_t count = 0;
  for_words(map, [&](IdWord& word, int64_t) {
    word.rank = static_cast<uint64_t>(count);
    count += num_bits(word.bits);
  });
  return count;
}

template <class Index>
void place_ids(const IdMap& map, const int64_t* first, int64_t num_first, const Index* others, int64_t num_others,
               int64_t num_distinct, int32_t* local, int32_t* positions, int64_t* fresh, int num_threads) {
  std::fill_n(local, num_distinct, -1);
  bool twice = false;
  for (int64_t i = 0; i < num_first; ++i) {
    int32_t& place = local[rank_of(map, first[i])];
    twice = twice || place >= 0;
    place = static_cast<int32_t>(i);
  }
  int64_t rank = 0, next = num_first;
  if (!twice) {
    for_words(map, [&](IdWord& word, int64_t number) {
      for (uint64_t bits = word.bits; bits != 0; bits &= bits - 1, ++rank) {
        if (local[rank] >= 0) continue;
        fresh[next - num_first] = number * kWordIds + __builtin_ctzll(bits);
        local[rank] = static_cast<int32_t>(next++);
      }
    });
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t chunk = 0; chunk < (num_others + kChunk - 1) / kChunk; ++chunk) {
      const int64_t begin = chunk * kChunk, end = std::min(begin + kChunk, num_others);
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < num_others) __builtin_prefetch(map.words + others[i + kAhead] / kWordIds);
        const int64_t place = rank_of(map, others[i]);
        __builtin_prefetch(local + place);
        positions[i] = static_cast<int32_t>(place);
      }
      for (int64_t i = begin; i < end; ++i) positions[i] = local[positions[i]];
    }
  }
  clear(map);
  if (twice) throw std::invalid_argument("an id occurs twice in first");
}

#define WEFT_INSTANTIATE(Index)                                                                                  \
  template int64_t mark_ids(const IdMap&, const int64_t*, int64_t, const Index*, int64_t, int);                  \
  template void place_ids(const IdMap&, const int64_t*, int64_t, const Index*, int64_t, int64_t, int32_t*, int32_t*, \
                          int64_t*, int);
WEFT_INSTANTIATE(int32_t)
WEFT_INSTANTIATE(int64_t)

}  // namespace weft
