#include "schedule.h"

#include <algorithm>
#include <vector>

namespace weft {
namespace {

constexpr int64_t kWordBits = 64;
constexpr int64_t kTeamWork = 1 << 15;  // numbers from which on several threads are worth it

// The rows that stay for a later round: all that are read before `round`, and `num_last` of those read in it.
struct Stay {
  int32_t round;
  int64_t num_last;
};

// Chooses `room` of some rows by the rounds that read them next.
Stay choose_soonest(std::vector<int32_t>& next_uses, int64_t room) {
  if (static_cast<int64_t>(next_uses.size()) <= room) return {kNever, 0};
  const auto last = next_uses.begin() + room;
  std::nth_element(next_uses.begin(), last, next_uses.end());
  return {*last, room - std::count_if(next_uses.begin(), last, [&](int32_t use) { return use < *last; })};
}

}  // namespace

template <class Index>
void distinct(const Index* values, const int64_t* starts, const int64_t* ranges, int64_t num_groups,
              int64_t num_numbers, Index* found, int64_t* counts, int num_threads) {
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
      Index* out = found + starts[group] - starts[0];
      if (ranges != nullptr) {
        for (int64_t number = ranges[group]; number < ranges[group + 1]; ++number) see(number);
        out += ranges[group] - ranges[0];
      }
      Index* const begin = out;
      for (int64_t word = low / kWordBits; word <= high / kWordBits && high >= 0; ++word) {
        for (uint64_t bits = seen[word]; bits != 0; bits &= bits - 1) {
          *out++ = static_cast<Index>(word * kWordBits + __builtin_ctzll(bits));
        }
        seen[word] = 0;
      }
      counts[group] = out - begin;
    }
  }
}

template <class Index>
void find_missing(const Index* numbers, int64_t size, const Index* others, int64_t num_others, bool* missing) {
  int64_t other = 0;
  for (int64_t i = 0; i < size; ++i) {
    while (other < num_others && others[other] < numbers[i]) ++other;
    missing[i] = other == num_others || others[other] != numbers[i];
  }
}

template <class Index>
int64_t keep_rows(Rows<Index> held, Rows<Index> read, int32_t round, int64_t room, bool ahead, Index* numbers,
                  int32_t* next_uses, bool* fresh, bool* leaving) {
  const int32_t first = round + 1 + ahead;  // the first round whose rows need room
  std::vector<int32_t> waiting;
  for (int64_t i = 0; i < held.size; ++i) {
    if (held.next_uses[i] >= first && held.next_uses[i] != kNever) waiting.push_back(held.next_uses[i]);
  }
  Stay stay = choose_soonest(waiting, room);
  int64_t count = 0, next_read = 0;
  const auto put = [&](Index number, int32_t use, bool is_fresh) {
    numbers[count] = number;
    next_uses[count] = use;
    fresh[count++] = is_fresh;
  };
  for (int64_t i = 0; i < held.size; ++i) {
    const Index number = held.numbers[i];
    const int32_t use = held.next_uses[i];
    for (; next_read < read.size && read.numbers[next_read] < number; ++next_read) {
      put(read.numbers[next_read], read.next_uses[next_read], true);
    }
    if (use == round && next_read < read.size && read.numbers[next_read] == number) {
      put(number, read.next_uses[next_read++], false);
      leaving[i] = false;
      continue;
    }
    const bool stays = use != kNever && (use < first || use < stay.round || (use == stay.round && stay.num_last-- > 0));
    if (stays) put(number, use, false);
    leaving[i] = !stays;
  }
  for (; next_read < read.size; ++next_read) put(read.numbers[next_read], read.next_uses[next_read], true);
  return count;
}

#define WEFT_INSTANTIATE(Index)                                                                                    \
  template void distinct(const Index*, const int64_t*, const int64_t*, int64_t, int64_t, Index*, int64_t*, int);   \
  template void find_missing(const Index*, int64_t, const Index*, int64_t, bool*);                                 \
  template int64_t keep_rows(Rows<Index>, Rows<Index>, int32_t, int64_t, bool, Index*, int32_t*, bool*, bool*);
WEFT_INSTANTIATE(int32_t)
WEFT_INSTANTIATE(int64_t)

}  // namespace weft
