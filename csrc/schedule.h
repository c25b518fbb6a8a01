// The sets of numbers that batches read, and where their rows lie (HongTu, sections 5.1 and 6).
// Sets stand one after the other in an array: set i from starts[i] to starts[i + 1].
#pragma once

#include <cstdint>

namespace weft {

// The distinct numbers of each group of `values`, ascending: group i from starts[i] to starts[i + 1]. Where `ranges`
// [num_groups + 1] is given, the numbers from ranges[i] to ranges[i + 1] belong to group i too. Those of group i are
// written to `found` from starts[i] - starts[0] + ranges[i] - ranges[0] on, where there is room for all; counts
// [num_groups] says how many. Takes num_numbers bits a thread.
template <class Index>
void distinct(const Index* values, const int64_t* starts, const int64_t* ranges, int64_t num_groups,
              int64_t num_numbers, int64_t* found, int64_t* counts, int num_threads);

// Which numbers of a set the one before it lacks, and which the one after it lacks; sets ascend.
void find_changes(const int64_t* numbers, const int64_t* starts, int64_t num_sets, bool* fresh, bool* leaving,
                  int num_threads);

// How long the row of each use of a number stays: fills until [numbers] with the next set that uses it, where it stays for
// that, else with the set after its own. room [num_sets] says how many rows a set can hold that it does not use: of those
// that are used again, the ones that wait longest go first (Belady 1966). ahead: the next set's own rows are there too, so
// that a row takes no room in the set before its next use.
void stay_until(const int64_t* numbers, const int64_t* starts, int64_t num_sets, int64_t num_numbers, const int64_t* room,
                bool ahead, int64_t* until);

// A block's edges into ranges of its targets, worked on in an order: batch j is the range order[j].
template <class Index>
struct Batches {
  const int64_t* indptr;
  const Index* indices;
  const int64_t* bounds;  // [count + 1]
  const int64_t* order;   // [count]
  int64_t count;
};

// Fills `slots`, where each batch keeps the rows of its set of numbers: what is not `fresh` where it was, the others in
// the lowest slots that are free. A slot is free again after the batch that its row is `leaving`; with `ahead` only
// when the next batch has its own. Fills places [E] with the slots of the edges' sources, and own [num_targets], unless
// it is null, with those of the targets. Returns the number of slots, the fewest that will do.
template <class Index>
int64_t assign_slots(const int64_t* numbers, const int64_t* starts, const bool* fresh, const bool* leaving,
                     int64_t num_numbers, const Batches<Index>& batches, bool ahead, int64_t* slots, Index* places,
                     int64_t* own, int num_threads);

}  // namespace weft
