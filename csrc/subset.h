// Unbiased random subsets, and the random words from which they are drawn.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace weft {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014), as weft.utils.random.mix64.
inline uint64_t mix_word(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// A number below `count` from a random word, uniform except for a relative bias of count / 2^64.
inline uint64_t below(uint64_t word, uint64_t count) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(word) * count) >> 64);
}

// Draws k of the numbers 0 to d - 1, ascending, all sets with equal probability, in O(k) expected time. Floyd's
// algorithm: the i-th draw is one of the first d - k + i + 1 numbers, or the last of these if the number was drawn
// before. If k is more than half of d, the numbers to leave out are drawn instead.
class Subset {
 public:
  template <class Visit>
  void draw(int64_t d, int64_t k, uint64_t word, Visit visit) {
    const bool left_out = k > d - k;
    const int64_t m = left_out ? d - k : k;
    if (d <= 64) return draw_word(d, m, word, left_out, visit);
    const bool few = !left_out && m <= kFew && d >= 4 * m * m && d < (int64_t{1} << 31);
    if (few && draw_few(d, m, word, visit)) return;
    if (left_out || d <= 64 * (2 * m + 2)) return draw_bits(d, m, word, left_out, visit);
    draw_table(d, m, word, visit);
  }

 private:
  static constexpr int64_t kFew = 32;

  static int length(uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

  static uint64_t ones(int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

  template <class Visit>
  static void visit_bits(uint64_t bits, int64_t first, Visit& visit) {
    for (; bits != 0; bits &= bits - 1) visit(first + __builtin_ctzll(bits));
  }

  template <class Visit>
  static void draw_word(int64_t d, int64_t m, uint64_t word, bool left_out, Visit& visit) {
    uint64_t bits = 0;
    for (int64_t i = 0; i < m; ++i) {
      const int64_t last = d - m + i;
      const uint64_t bit = uint64_t{1} << below(mix_word(word ^ static_cast<uint64_t>(i)), last + 1);
      bits |= (bits & bit) != 0 ? uint64_t{1} << last : bit;
    }
    visit_bits(left_out ? ~bits & ones(d) : bits, 0, visit);
  }

  // For few numbers out of many, which are usually distinct: sorts them by counting the smaller ones, without branches
  // that depend on the numbers. Returns false, without a visit, if two of them are equal.
  template <class Visit>
  static bool draw_few(int64_t d, int64_t m, uint64_t word, Visit& visit) {
    constexpr int64_t kLanes = 4;
    int32_t drawn[kFew], rank[kFew] = {}, alike[kFew] = {}, sorted[kFew];
    const int64_t padded = (m + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < padded; ++i) {
      const uint64_t number = below(mix_word(word ^ static_cast<uint64_t>(i)), d - m + i + 1);
      drawn[i] = i < m ? static_cast<int32_t>(number) : -1;
    }
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < padded; ++j) {
        rank[j] += drawn[i] < drawn[j];
        alike[j] += drawn[i] == drawn[j];
      }
    }
    int32_t num_alike = 0;
    for (int64_t i = 0; i < m; ++i) num_alike += alike[i];
    if (num_alike != m) return false;
    for (int64_t i = 0; i < m; ++i) sorted[rank[i]] = drawn[i];
    for (int64_t i = 0; i < m; ++i) visit(int64_t{sorted[i]});
    return true;
  }

  template <class Visit>
  void draw_bits(int64_t d, int64_t m, uint64_t word, bool left_out, Visit& visit) {
    const int64_t num_words = (d + 63) / 64;
    bits_.assign(num_words, 0);
    for (int64_t i = 0; i < m; ++i) {
      const int64_t last = d - m + i;
      const int64_t drawn = below(mix_word(word ^ static_cast<uint64_t>(i)), last + 1);
      const bool taken = bits_[drawn / 64] >> (drawn % 64) & 1;
      const int64_t chosen = taken ? last : drawn;
      bits_[chosen / 64] |= uint64_t{1} << (chosen % 64);
    }
    for (int64_t at = 0; at < num_words; ++at) {
      const uint64_t bits = left_out ? ~bits_[at] & ones(d - 64 * at) : bits_[at];
      visit_bits(bits, 64 * at, visit);
    }
  }

  // For large d: a hash table whose slots are in the order of the numbers, except within a run of occupied slots.
  // Random numbers spread evenly over the slots, so runs are short and the final insertion sort is fast.
  template <class Visit>
  void draw_table(int64_t d, int64_t m, uint64_t word, Visit& visit) {
    const int shift = std::max(0, length(d - 1) - length(m) - 1);
    const int64_t num_slots = ((d - 1) >> shift) + 1 + m;  // including m slots for the last run
    slots_.assign(num_slots, -1);
    const auto add = [&](int64_t number) {
      int64_t slot = number >> shift;
      while (slots_[slot] >= 0 && slots_[slot] != number) ++slot;
      const bool fresh = slots_[slot] < 0;
      slots_[slot] = number;
      return fresh;
    };
    for (int64_t i = 0; i < m; ++i) {
      const int64_t last = d - m + i;
      if (!add(below(mix_word(word ^ static_cast<uint64_t>(i)), last + 1))) add(last);
    }
    int64_t count = 0;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const int64_t number = slots_[slot];
      slots_[count] = number;
      count += number >= 0;
    }
    for (int64_t i = 0; i < count; ++i) {  // nearly sorted
      const int64_t number = slots_[i];
      int64_t at = i;
      for (; at > 0 && slots_[at - 1] > number; --at) slots_[at] = slots_[at - 1];
      slots_[at] = number;
    }
    for (int64_t i = 0; i < count; ++i) visit(slots_[i]);
  }

  std::vector<uint64_t> bits_;
  std::vector<int64_t> slots_;
};

}  // namespace weft
