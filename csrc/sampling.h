// Samples the in-edges of targets. A sample depends only on a key and the target (with LABOR on key, source and
// in-degree of the target), so it is the same for any number of threads and any division of the targets.
#pragma once

#include <cstdint>

namespace weft {

constexpr int64_t kAllEdges = -1;  // fanout: take all edges

// Methods to sample k of a target's d in-edges:
//
// kUniform: a set of k edges, all sets with equal probability, by Floyd's algorithm (Bentley and Floyd 1987) on
//   positions in the row. O(k) work and reads for any degree.
// kLabor: edge u -> v if a random number of u, which all targets share, is below k / d (LABOR-0, Balin and Catalyurek
//   2023). O(d). Each edge has probability min(1, k / d).
// kWeighted: Poisson sampling: each edge independently with probability min(1, c w), where c makes the expected number
//   k. If no more than k weights are above 0, all of these edges. O(d).
enum class Method { kUniform, kLabor, kWeighted };

template <class Index>
struct Sampling {
  const int64_t* indptr;
  const Index* indices;
  const float* weight32;   // [E], or
  const double* weight64;  // [E]; both null unless kWeighted
  const int16_t* type16;   // [E], or
  const int32_t* type32;   // [E]: relations, which are sampled separately, in O(d); both null: one relation
  const int64_t* ids;      // [N]: id of each vertex in the hashes; null: its number
  const int64_t* fanouts;  // [num_relations]
  int64_t num_relations;
  Method method;
  uint64_t key, next_key;
  double turn;  // kLabor, in [0, 1]: the random number is Phi(cos(pi/2 turn) z + sin(pi/2 turn) z'), with normal
                // numbers z and z' of key and next_key ("Cooperative minibatching", Balin et al. 2023); below 0: it is
                // uniform, of key
};

// A target as both passes need it. Pass 1 stores it, since reading it from the graph again would miss the cache.
struct SampledRow {
  int64_t begin, end;  // entries in the graph
  uint64_t word;       // mix64(key ^ id)
};

// Pass 1: fills rows [n]; block [n + 1], the start of each target's sampled edges; and row_scale [n], unless it is
// null, with max(1, d / k) for the first fanout. Throws std::invalid_argument if a target or a relation is out of
// range, or if a weight that is read is negative or not finite.
template <class Index>
void count_sample(const Sampling<Index>& a, const int64_t* targets, int64_t num_targets, int64_t num_vertices,
                  SampledRow* rows, int64_t* block, double* row_scale, int num_threads);

// Pass 2: fills edge_ids and sources in the order of block, with ascending edges in each row; and scale, unless it is
// null, with 1 / (probability of the edge).
template <class Index, class Id>
void fill_sample(const Sampling<Index>& a, const SampledRow* rows, int64_t num_targets, const int64_t* block,
                 Id* edge_ids, Index* sources, double* scale, int num_threads);

}  // namespace weft
