// Graph partitioning. An edge belongs to the part of its target. The remote vertices of a part are the distinct sources
// of its edges that are in other parts. Results do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace weft {

// Rows of a table of counts, with an entry for each part.
enum Count { kVertices, kInEdges, kRemote, kNumCounts };

// Fills counts [kNumCounts, num_parts], and returns the number of edges between different parts (the cut). Needs a byte
// for each vertex and part.
template <class Index>
int64_t count_parts(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part,
                    int64_t num_parts, int64_t* counts, int num_threads);

// Fennel (Tsourakakis, Gkantsidis, Radunovic, Vojnovic 2014, with gamma = 1.5). Assigns each vertex, in the given
// order, to the part with the largest
//
//   (edges to and from vertices already in the part) - 1.5 sqrt(P) E / N^1.5 * sqrt(vertices in the part)
//
// The first term keeps neighbours together, the second one balances the parts. Ties go to the part with the fewest
// vertices, then to the first. No part gets more than `most` vertices; most * num_parts must be at least num_vertices.
template <class Index>
void fennel(const int64_t* indptr, const Index* indices, const int64_t* indptr_t, const Index* indices_t,
            int64_t num_vertices, const int64_t* order, int64_t num_parts, int64_t most, int32_t* part);

// Largest deviation of a part's load from the mean load, relative to the mean. num_parts - 1 or more means no limit.
struct Slack {
  double vertices, in_edges, remote;
};

// Improves a partition by moving single vertices, so that every load comes within its slack while few edges are cut and
// few vertices are remote:
//
// 1. Passes over the vertices in the given order move each vertex to the part where it costs least. The cost includes
//    the cut, the remote vertices, and a price for loads outside of their slack, which rises from pass to pass.
// 2. The first stage balances vertices and in-edges, the second one also the remote vertices; each has at most
//    `max_passes` passes.
//
// Fills counts [kNumCounts, num_parts] and returns the cut. If no partition satisfies the slack (for example because a
// hub has most of the edges), some loads stay outside of it. Needs 4 bytes for each vertex and part; a pass reads E
// num_parts numbers, a move takes O(in-degree).
template <class Index>
int64_t refine(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int64_t* order,
               int64_t num_parts, const Slack& slack, int64_t max_passes, int32_t* part, int64_t* counts);

}  // namespace weft
