// Dividing the vertices among parts. An edge belongs to its target's part; a part's remote vertices are the distinct
// sources of its edges that lie in other parts. Results depend on the arguments alone, not on the number of threads.
#pragma once

#include <cstdint>

namespace weft {

// Rows of a table of counts, each with one entry a part.
enum Count { kVertices, kInEdges, kRemote, kNumCounts };

// Fills counts [kNumCounts, num_parts]; returns how many edges lead from one part to another. Takes a byte a vertex and part.
template <class Index>
int64_t count_parts(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part,
                    int64_t num_parts, int64_t* counts, int num_threads);

// Fennel (Tsourakakis, Gkantsidis, Radunovic, Vojnovic 2014, with gamma = 1.5): puts each vertex, in the order given,
// where it has the most edges to and from those already placed, less 1.5 sqrt(P) E / N^1.5 times the root of the part's
// vertices. No part gets more than `most` vertices, and most * num_parts is at least num_vertices. Of equal parts the one
// with the fewest vertices is taken, then the first.
template <class Index>
void fennel(const int64_t* indptr, const Index* indices, const int64_t* indptr_t, const Index* indices_t,
            int64_t num_vertices, const int64_t* order, int64_t num_parts, int64_t most, int32_t* part);

// How far a part may be from the mean of all, as a fraction of it; from num_parts - 1 on that is no limit.
struct Slack {
  double vertices, in_edges, remote;
};

// Moves vertices between parts, one at a time in the order given and over again, so that every load comes within its
// slack while few edges are cut and few vertices are remote: first vertices and in-edges, then remote vertices as well,
// at most `max_passes` each. Fills counts [kNumCounts, num_parts] as tracked during the moves; returns the cut. Where no
// partition keeps to the slack, for example beside a hub with most of the edges, loads stay outside. Takes 4 bytes a
// vertex and part; a pass looks at E num_parts numbers, a move costs O(in-degree).
template <class Index>
int64_t refine(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int64_t* order,
               int64_t num_parts, const Slack& slack, int64_t max_passes, int32_t* part, int64_t* counts);

}  // namespace weft
