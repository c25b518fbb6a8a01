// The sets of vertices that batches read, and the slots of their rows (HongTu, sections 5.1 and 6).
// One array has all sets: set i is from starts[i] up to starts[i + 1].
#pragma once

#include <cstdint>

namespace weft {

// Finds the distinct numbers of each group of `values`, ascending. Group i is from starts[i] up to starts[i + 1]; with
// ranges [num_groups + 1], the numbers from ranges[i] up to ranges[i + 1] belong to it as well. Writes the numbers of
// group i to `found`, from starts[i] - starts[0] + ranges[i] - ranges[0] on, and fills counts [num_groups] with their
// number. Needs num_numbers bits for each thread.
template <class Index>
void distinct(const Index* values, const int64_t* starts, const int64_t* ranges, int64_t num_groups,
              int64_t num_numbers, int64_t* found, int64_t* counts, int num_threads);

// Marks the numbers of each set that the previous set lacks (fresh), and those that the next set lacks (leaving). Sets
// ascend.
void find_changes(const int64_t* numbers, const int64_t* starts, int64_t num_sets, bool* fresh, bool* leaving,
                  int num_threads);

// Decides how long each row stays in its slot (Belady 1966). For each use of a number, fills `until` with the next set
// that uses it if the row stays until then, otherwise with the set after its own. room [num_sets]: how many rows that a
// set does not use may stay during it. If there are more, those whose next use is latest are evicted first. ahead: the
// rows of the next set are loaded during a set, so a row needs no room in the set before its next use.
void stay_until(const int64_t* numbers, const int64_t* starts, int64_t num_sets, int64_t num_numbers, const int64_t* room,
                bool ahead, int64_t* until);

// Fills extended [num_sets + 1] with the starts of the sets that `extend_sets` writes.
void extended_starts(const int64_t* starts, int64_t num_sets, const int64_t* until, int64_t* extended);

// Writes each set with the numbers that stay during it, ascending: a number of set i is also in the sets up to, and
// without, its `until`. Before that, no set may use the number again.
void extend_sets(const int64_t* numbers, const int64_t* starts, int64_t num_sets, const int64_t* until,
                 int64_t* extended);

// The edges of a block, divided into ranges of its targets (chunks). Batch j runs the range order[j].
template <class Index>
struct Batches {
  const int64_t* indptr;
  const Index* indices;
  const int64_t* bounds;  // [count + 1]
  const int64_t* order;   // [count]
  int64_t count;
};

// Fills `slots` with the slot of each row of each batch. A row that is not `fresh` stays in its slot; others get the
// lowest free slots. A slot becomes free after the batch in which its row is `leaving`; with `ahead`, only after the
// slots of the next batch are assigned. Fills places [E] with the slots of the edges' sources, and own [num_targets],
// unless it is null, with those of the targets. Returns the number of slots, which is the smallest possible.
template <class Index>
int64_t assign_slots(const int64_t* numbers, const int64_t* starts, const bool* fresh, const bool* leaving,
                     int64_t num_numbers, const Batches<Index>& batches, bool ahead, int64_t* slots, Index* places,
                     int64_t* own, int num_threads);

}  // namespace weft
