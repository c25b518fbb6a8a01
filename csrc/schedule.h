// The rows that chunks read, and which of them stay in a buffer between rounds (HongTu, sections 5.1 and 6).
#pragma once

#include <cstdint>

namespace weft {

// Finds the distinct numbers of each group of `values`, ascending. Group i is from starts[i] up to starts[i + 1]; with
// ranges [num_groups + 1], the numbers from ranges[i] up to ranges[i + 1] belong to it as well. Writes the numbers of
// group i to `found`, from starts[i] - starts[0] + ranges[i] - ranges[0] on, and fills counts [num_groups] with their
// number. Needs num_numbers bits for each thread.
template <class Index>
void distinct(const Index* values, const int64_t* starts, const int64_t* ranges, int64_t num_groups,
              int64_t num_numbers, Index* found, int64_t* counts, int num_threads);

// Marks the numbers that are not among `others`. Both ascend.
template <class Index>
void find_missing(const Index* numbers, int64_t size, const Index* others, int64_t num_others, bool* missing);

// Rows of a buffer, ascending, with the next round that reads each; kNever if none does.
template <class Index>
struct Rows {
  const Index* numbers;
  const int32_t* next_uses;
  int64_t size;
};

constexpr int32_t kNever = INT32_MAX;

// Decides which of the rows that are held from the round before stay in a round (Belady 1966): those that it reads
// itself, and of the rows that a later round reads, at most `room`, those that are read soonest. ahead: the rows of the
// next round are loaded during this one, so they need no room. Writes the rows that are in the buffer then to `numbers`
// and `next_uses`, and whether they were not held before to `fresh` [read.size + held.size]; fills `leaving` with the
// held rows that do not stay. Returns the number of rows in the buffer.
template <class Index>
int64_t keep_rows(Rows<Index> held, Rows<Index> read, int32_t round, int64_t room, bool ahead, Index* numbers,
                  int32_t* next_uses, bool* fresh, bool* leaving);

}  // namespace weft
