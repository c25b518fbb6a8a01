#include "schedule.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace weft {
namespace {

constexpr int64_t kWordBits = 64;
constexpr int64_t kTeamWork = 1 << 15;  // numbers or edges from which on several threads are worth it

// The used slots; take() returns the lowest free one.
class Slots {
 public:
  int64_t size() const { return size_; }

  // Starts the search for free slots from slot 0 again. Call it after slots were released; otherwise the search goes on
  // from the last slot that it has returned.
  void rewind() { word_ = 0; }

  int64_t take() {
    const auto num_words = static_cast<int64_t>(used_.size());
    while (word_ < num_words && used_[word_] == ~uint64_t{0}) ++word_;
    if (word_ == num_words) used_.push_back(0);
    const int bit = __builtin_ctzll(~used_[word_]);
    used_[word_] |= uint64_t{1} << bit;
    const int64_t slot = word_ * kWordBits + bit;
    size_ = std::max(size_, slot + 1);
    return slot;
  }

  void release(int64_t slot) { used_[slot / kWordBits] &= ~(uint64_t{1} << (slot % kWordBits)); }

 private:
  std::vector<uint64_t> used_;
  int64_t word_ = 0, size_ = 0;
};

}  // namespace

template <class Index>
void distinct(const Index* values, const int64_t* starts, const int64_t* ranges, int64_t num_groups,
              int64_t num_numbers, int64_t* found, int64_t* counts, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (starts[num_groups] - starts[0] > kTeamWork)
  {
    std::vector<uint64_t> seen(num_numbers / kWordBits + 1);
#pragma omp for schedule(dynamic)
    for (int64_t group = 0; group < num_groups; ++group) {
      int64_t low = num_numbers, high = -1;
      const auto see = [&](int64_t number) {
        low = std::min(low, number);
        high = std::max(high, number);
        seen[number / kWordBits] |= uint64_t{1} << (number % kWordBits);
      };
      for (int64_t i = starts[group]; i < starts[group + 1]; ++i) see(values[i]);
      int64_t* out = found + starts[group] - starts[0];
      if (ranges != nullptr) {
        for (int64_t number = ranges[group]; number < ranges[group + 1]; ++number) see(number);
        out += ranges[group] - ranges[0];
      }
      int64_t* const begin = out;
      for (int64_t word = low / kWordBits; word <= high / kWordBits && high >= 0; ++word) {
        for (uint64_t bits = seen[word]; bits != 0; bits &= bits - 1) *out++ = word * kWordBits + __builtin_ctzll(bits);
        seen[word] = 0;
      }
      counts[group] = out - begin;
    }
  }
}

void find_changes(const int64_t* numbers, const int64_t* starts, int64_t num_sets, bool* fresh, bool* leaving,
                  int num_threads) {
  // Marks the numbers of a set that another one lacks.
  const auto compare = [&](int64_t set, int64_t other, bool* lacks) {
    const bool any = other >= 0 && other < num_sets;
    int64_t i = any ? starts[other] : 0;
    const int64_t end = any ? starts[other + 1] : 0;
    for (int64_t k = starts[set]; k < starts[set + 1]; ++k) {
      while (i < end && numbers[i] < numbers[k]) ++i;
      lacks[k] = i == end || numbers[i] != numbers[k];
    }
  };
#pragma omp parallel for num_threads(num_threads) schedule(dynamic) if (starts[num_sets] - starts[0] > kTeamWork)
  for (int64_t set = 0; set < num_sets; ++set) {
    compare(set, set - 1, fresh);
    compare(set, set + 1, leaving);
  }
}

void stay_until(const int64_t* numbers, const int64_t* starts, int64_t num_sets, int64_t num_numbers, const int64_t* room,
                bool ahead, int64_t* until) {
  std::vector<int64_t> next(num_numbers, num_sets);  // the next set that uses a number
  for (int64_t set = num_sets - 1; set >= 0; --set) {
    for (int64_t i = starts[set]; i < starts[set + 1]; ++i) {
      until[i] = next[numbers[i]];
      next[numbers[i]] = set;
    }
  }
  // Uses whose rows stay for a later set, by the set from which on they need no room.
  std::vector<std::vector<int64_t>> waiting(num_sets + 1);
  int64_t count = 0, latest = 0;
  for (int64_t set = 0; set < num_sets; ++set) {
    for (int64_t i = set == 0 ? 0 : starts[set - 1]; i < starts[set]; ++i) {
      if (until[i] == num_sets) {
        until[i] = set;
      } else if (const int64_t end = until[i] - ahead; end > set) {
        waiting[end].push_back(i);
        latest = std::max(latest, end);
        ++count;
      }
    }
    count -= static_cast<int64_t>(waiting[set].size());
    waiting[set].clear();
    for (; count > room[set]; --count) {
      while (waiting[latest].empty()) --latest;
      until[waiting[latest].back()] = -1;
      waiting[latest].pop_back();
    }
  }
  for (int64_t set = 0; set < num_sets; ++set) {
    for (int64_t i = starts[set]; i < starts[set + 1]; ++i) {
      if (until[i] < 0 || until[i] == num_sets) until[i] = set + 1;
    }
  }
}

void extended_starts(const int64_t* starts, int64_t num_sets, const int64_t* until, int64_t* extended) {
  std::vector<int64_t> change(num_sets + 2);  // of how many numbers stay, from each set to the next
  for (int64_t set = 0; set < num_sets; ++set) {
    for (int64_t i = starts[set]; i < starts[set + 1]; ++i) {
      if (until[i] <= set + 1) continue;
      ++change[set + 1];
      --change[until[i]];
    }
  }
  extended[0] = 0;
  for (int64_t set = 0, staying = 0; set < num_sets; ++set) {
    staying += change[set];
    extended[set + 1] = extended[set] + starts[set + 1] - starts[set] + staying;
  }
}

void extend_sets(const int64_t* numbers, const int64_t* starts, int64_t num_sets, const int64_t* until,
                 int64_t* extended) {
  std::vector<std::pair<int64_t, int64_t>> staying, next;  // numbers, ascending, with their `until`
  for (int64_t set = 0; set < num_sets; ++set) {
    next.clear();
    const auto put = [&](int64_t number, int64_t end) {
      *extended++ = number;
      if (end > set + 1) next.emplace_back(number, end);
    };
    auto kept = staying.begin();
    for (int64_t i = starts[set]; i < starts[set + 1]; ++i) {
      for (; kept != staying.end() && kept->first < numbers[i]; ++kept) put(kept->first, kept->second);
      put(numbers[i], until[i]);
    }
    for (; kept != staying.end(); ++kept) put(kept->first, kept->second);
    staying.swap(next);
  }
}

template <class Index>
int64_t assign_slots(const int64_t* numbers, const int64_t* starts, const bool* fresh, const bool* leaving,
                     int64_t num_numbers, const Batches<Index>& batches, bool ahead, int64_t* slots, Index* places,
                     int64_t* own, int num_threads) {
  std::vector<Index> slot_of(num_numbers, -1);
  Slots free;
  const auto release = [&](int64_t set) {
    if (set < 0) return;
    for (int64_t i = starts[set]; i < starts[set + 1]; ++i) {
      if (leaving[i]) free.release(slots[i]);
    }
  };
  for (int64_t batch = 0; batch < batches.count; ++batch) {
    if (!ahead) release(batch - 1);
    free.rewind();
    for (int64_t i = starts[batch]; i < starts[batch + 1]; ++i) {
      if (fresh[i]) slot_of[numbers[i]] = static_cast<Index>(free.take());
      slots[i] = slot_of[numbers[i]];
    }
    if (ahead) release(batch - 1);
    if (free.size() > std::numeric_limits<Index>::max()) throw std::overflow_error("too many slots for the indices");
    const int64_t chunk = batches.order[batch], first = batches.bounds[chunk], end = batches.bounds[chunk + 1];
    const int64_t begin_edge = batches.indptr[first], end_edge = batches.indptr[end];
#pragma omp parallel for num_threads(num_threads) schedule(static) if (end_edge - begin_edge > kTeamWork)
    for (int64_t edge = begin_edge; edge < end_edge; ++edge) {
      places[edge] = slot_of[batches.indices[edge]];
    }
    if (own == nullptr) continue;
    for (int64_t target = first; target < end; ++target) own[target] = slot_of[target];
  }
  return free.size();
}

#define WEFT_INSTANTIATE(Index)                                                                                       \
  template void distinct(const Index*, const int64_t*, const int64_t*, int64_t, int64_t, int64_t*, int64_t*, int);    \
  template int64_t assign_slots(const int64_t*, const int64_t*, const bool*, const bool*, int64_t,                    \
                                const Batches<Index>&, bool, int64_t*, Index*, int64_t*, int);
WEFT_INSTANTIATE(int32_t)
WEFT_INSTANTIATE(int64_t)

}  // namespace weft
