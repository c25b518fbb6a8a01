// Sampling the in-edges of targets. A draw depends on a key and on the target alone (or, with LABOR, on key, source and
// the target's in-degree): the same sample for any number of threads, and for any split of the targets.
#pragma once

#include <cstdint>

namespace weft {

constexpr int64_t kAllEdges = -1;  // as a fanout: no draw

// uniform: k of the target's d edges, each set of k alike: Floyd's algorithm (Bentley and Floyd 1987) on positions in the
// row. O(k) work and reads, whatever the degree.
// labor: edge u -> v where u's variate, which all targets share, is below k / d (LABOR-0, Balin and Catalyurek 2023).
// O(d). Inclusion probability min(1, k / d).
// weighted: Poisson: each edge by itself, with probability min(1, c w), where c makes the expected number k, or takes
// all edges whose weight is not 0 where there are fewer. O(d).
enum class Method { kUniform, kLabor, kWeighted };

template <class Index>
struct Sampling {
  const int64_t* indptr;
  const Index* indices;
  const float* weight32;   // [E], or
  const double* weight64;  // [E]; both null but for kWeighted
  const int16_t* type16;   // [E], or
  const int32_t* type32;   // [E]: relations, whose edges are drawn apart, in O(d) with any method; null: one relation
  const int64_t* ids;      // by vertex, what keys its draws; null: its number
  const int64_t* fanouts;  // by relation
  int64_t num_relations;
  Method method;
  uint64_t key, next_key;
  double turn;  // labor, in [0, 1]: the variate is Phi(cos(pi/2 turn) z + sin(pi/2 turn) z'), of normal variates that are
                // keyed by key and next_key ("Cooperative minibatching", Balin et al. 2023); below 0: uniform, by key
};

// What a target's draws need; kept between the two passes, since reading it again would miss the cache.
struct SampledRow {
  int64_t begin, end;  // in the graph
  uint64_t word;       // mix64(key ^ id)
};

// Pass 1: fills rows [n]; block [n + 1], where each target's sampled edges begin; and row_scale [n], unless it is null,
// with max(1, d / k) of the first fanout. Throws std::invalid_argument where a target or a relation is out of range, or
// a weight that counts is not finite or negative.
template <class Index>
void count_sample(const Sampling<Index>& a, const int64_t* targets, int64_t num_targets, int64_t num_vertices,
                  SampledRow* rows, int64_t* block, double* row_scale, int num_threads);

// Pass 2: fills edge_ids and sources, both by block, edges ascending in each row; and scale, unless it is null: one over
// the probability that the edge was taken.
template <class Index, class Id>
void fill_sample(const Sampling<Index>& a, const SampledRow* rows, int64_t num_targets, const int64_t* block,
                 Id* edge_ids, Index* sources, double* scale, int num_threads);

}  // namespace weft
