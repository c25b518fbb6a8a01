// Attention whose logits depend on both endpoints of an edge (GATv2): logits, softmax, weighted sums, and their
// gradients.
//
// Arrays by edge and head are stored, [E + n, H]: the edges in their order, then the self-loop of every target, 0 if it
// has none. Arrays by edge and column are not stored; the backward pass computes their numbers again, once by target
// and once by source. The sign of a softmax weight says whether dropout drops it.
#pragma once

#include "chunk.h"
#include "edge_mask.h"
#include "exp.h"
#include "kernels.h"
#include "softmax.h"

namespace weft::WEFT_ISA {

// Calls visit(neighbour, edge, ahead) for a row's entries and then its loop. `ahead` is the neighbour of a later entry,
// to prefetch its row.
template <class I, class Edge, class Visit>
WEFT_INLINE void for_entries(const int64_t* indptr, const I* indices, int64_t num_rows, int64_t row, bool loop,
                             Edge edge, Visit visit) {
  constexpr int64_t distance = 8;
  const int64_t last = indptr[num_rows] - 1;
  for (int64_t entry = indptr[row]; entry < indptr[row + 1]; ++entry) {
    const int64_t ahead = entry + distance < last ? entry + distance : last;
    visit(static_cast<int64_t>(indices[entry]), edge(entry), static_cast<int64_t>(indices[ahead]));
  }
  if (loop) visit(row, indptr[num_rows] + row, row);
}

template <class T, class I>
WEFT_INLINE const T* features_of(const Pairs<T, I>& a, int64_t edge) {
  const int64_t num_edges = a.indptr[a.num_targets];
  return edge < num_edges ? a.features + edge * a.num_features : a.loop_features + (edge - num_edges) * a.num_features;
}

// z = own + other + features edge_map for one edge: the arguments of LeakyReLU, by column.
template <class T, class I>
WEFT_INLINE void pair_arguments(const Pairs<T, I>& a, const T* own, const T* other, int64_t edge, T* z) {
  for (int64_t column = 0; column < a.width; ++column) z[column] = own[column] + other[column];
  const T* features = features_of(a, edge);
  for (int64_t feature = 0; feature < a.num_features; ++feature) {
    const T value = features[feature];
    const T* map = a.edge_map + feature * a.width;
    for (int64_t column = 0; column < a.width; ++column) z[column] += value * map[column];
  }
}

template <class T, class I>
void pair_logits(const Pairs<T, I>& a, T* logits) {
  const int64_t num_edges = a.indptr[a.num_targets];
  for_row_blocks(a.indptr, a.num_targets, a.num_threads, [&](int64_t first, int64_t end) {
    const Scratch<T> scratch(a.width);
    T* z = scratch.numbers;
    for (int64_t row = first; row < end; ++row) {
      const bool loop = a.loop && a.loop[row];
      for_entries(
          a.indptr, a.indices, a.num_targets, row, loop, [](int64_t entry) { return entry; },
          [&](int64_t source, int64_t edge, int64_t ahead) {
            prefetch_row(a.left + ahead * a.width, a.width);
            pair_arguments(a, a.right + row * a.width, a.left + source * a.width, edge, z);
            for (int64_t column = 0; column < a.width; ++column) {
              z[column] = a.attention[column] * leaky_relu(z[column], a.slope);
            }
            for (int64_t head = 0; head < a.num_heads; ++head) {
              T sum = 0;
#pragma omp simd reduction(+ : sum)
              for (int64_t column = a.bounds[head]; column < a.bounds[head + 1]; ++column) sum += z[column];
              logits[edge * a.num_heads + head] = sum;
            }
          });
      if (a.loop && !loop) {
        for (int64_t head = 0; head < a.num_heads; ++head) logits[(num_edges + row) * a.num_heads + head] = 0;
      }
    }
  });
}

// d = gradient of the arguments z by column, without the factor `attention`: grad_logit times the slope of LeakyReLU.
template <class T, class I>
WEFT_INLINE void pair_slopes(const Pairs<T, I>& a, const T* grad, const T* z, T* d) {
  for (int64_t head = 0; head < a.num_heads; ++head) {
    const T upper = grad[head], lower = upper * a.slope;
    const int64_t end = a.bounds[head + 1];
#pragma omp simd
    for (int64_t column = a.bounds[head]; column < end; ++column) d[column] = z[column] > 0 ? upper : lower;
  }
}

// Computes the gradients of right, attention and edge_map. The latter two are sums over all edges: each block of rows
// has a partial sum, and these are added in order. The blocks do not depend on the number of threads, so results are
// bitwise equal for any number of threads.
template <class T, class I>
void pair_backward_targets(const PairsBackward<T, I>& b) {
  const Pairs<T, I>& a = b.pairs;
  const RowBlocks blocks(a.indptr, a.num_targets, 1);
  const int64_t width = a.width, size = (1 + a.num_features) * width;
  const Scratch<T> parts(blocks.num_blocks * size);
#pragma omp parallel for schedule(dynamic, 1) num_threads(useful_threads(blocks.num_blocks, a.num_threads))
  for (int64_t block = 0; block < blocks.num_blocks; ++block) {
    const Scratch<T> scratch(2 * width);
    T *z = scratch.numbers, *d = z + width, *grad_attention = parts.numbers + block * size;
    T* grad_map = grad_attention + width;
    for (int64_t row = blocks.row(block); row < blocks.row(block + 1); ++row) {
      T* grad_right = b.grad_right + row * width;
      for (int64_t column = 0; column < width; ++column) grad_right[column] = 0;
      for_entries(
          a.indptr, a.indices, a.num_targets, row, a.loop && a.loop[row], [](int64_t entry) { return entry; },
          [&](int64_t source, int64_t edge, int64_t ahead) {
            prefetch_row(a.left + ahead * width, width);
            pair_arguments(a, a.right + row * width, a.left + source * width, edge, z);
            pair_slopes(a, b.grad_logits + edge * a.num_heads, z, d);
            for (int64_t column = 0; column < width; ++column) {
              grad_attention[column] += d[column] * z[column];
              grad_right[column] += d[column];
            }
            const T* features = features_of(a, edge);
            for (int64_t feature = 0; feature < a.num_features; ++feature) {
              const T value = features[feature];
              T* grad = grad_map + feature * width;
              for (int64_t column = 0; column < width; ++column) grad[column] += value * d[column];
            }
          });
      for (int64_t column = 0; column < width; ++column) grad_right[column] *= a.attention[column];
    }
  }
  for (int64_t column = 0; column < width; ++column) b.grad_attention[column] = 0;
  for (int64_t at = 0; at < a.num_features * width; ++at) b.grad_edge_map[at] = 0;
  for (int64_t block = 0; block < blocks.num_blocks; ++block) {
    const T *attention = parts.numbers + block * size, *map = attention + width;
    for (int64_t column = 0; column < width; ++column) b.grad_attention[column] += attention[column];
    for (int64_t at = 0; at < a.num_features * width; ++at) {
      b.grad_edge_map[at] += map[at] * a.attention[at % width];
    }
  }
}

template <class T, class I>
void pair_backward_sources(const PairsBackward<T, I>& b) {
  const Pairs<T, I>& a = b.pairs;
  const int64_t width = a.width;
  for_row_blocks(b.indptr_t, b.num_sources, a.num_threads, [&](int64_t first, int64_t end) {
    const Scratch<T> scratch(2 * width);
    T *z = scratch.numbers, *d = z + width;
    for (int64_t row = first; row < end; ++row) {
      T* grad_left = b.grad_left + row * width;
      for (int64_t column = 0; column < width; ++column) grad_left[column] = 0;
      for_entries(
          b.indptr_t, b.indices_t, b.num_sources, row, a.loop && row < a.num_targets && a.loop[row],
          [&](int64_t entry) { return b.edge_ids[entry]; },
          [&](int64_t target, int64_t edge, int64_t ahead) {
            prefetch_row(a.right + ahead * width, width);
            pair_arguments(a, a.right + target * width, a.left + row * width, edge, z);
            pair_slopes(a, b.grad_logits + edge * a.num_heads, z, d);
            for (int64_t column = 0; column < width; ++column) grad_left[column] += d[column];
          });
      for (int64_t column = 0; column < width; ++column) grad_left[column] *= a.attention[column];
    }
  });
}

template <class T, class I>
void pair_backward(const PairsBackward<T, I>& b) {
  pair_backward_targets(b);
  pair_backward_sources(b);
}

// Softmax of the logits for each row and head. If all logits of a row and head are -inf, the weights are zero.
//
// 1. Find the largest logit, so that no exponential overflows.
// 2. Compute the exponentials of the differences to it, for all heads of the row in whole vectors.
// 3. Sum them, and multiply by the reciprocal of the sum.
template <class T>
void edge_softmax(const EdgeSoftmax<T>& a) {
  constexpr int L = kLanes<T>;
  const int64_t heads = a.num_heads, num_edges = a.indptr[a.num_targets];
  for_row_blocks(a.indptr, a.num_targets, a.num_threads, [&](int64_t first, int64_t end) {
    const Scratch<T> scratch(2 * heads);
    T *largest = scratch.numbers, *sum = largest + heads;
    for (int64_t row = first; row < end; ++row) {
      const int64_t begin = a.indptr[row] * heads, stop = a.indptr[row + 1] * heads, own = (num_edges + row) * heads;
      const bool loop = a.loop && a.loop[row];
      for (int64_t head = 0; head < heads; ++head) {
        sum[head] = 0;
        largest[head] = loop ? a.logits[own + head] : -kInfinity<T>;
      }
      for (int64_t at = begin; at < stop; at += heads) {
        for (int64_t head = 0; head < heads; ++head) {
          largest[head] = a.logits[at + head] > largest[head] ? a.logits[at + head] : largest[head];
        }
      }
      for (int64_t head = 0; head < heads; ++head) largest[head] = largest[head] == -kInfinity<T> ? 0 : largest[head];
      for (int64_t at = begin; at < stop; at += heads) {
        for (int64_t head = 0; head < heads; ++head) a.alpha[at + head] = a.logits[at + head] - largest[head];
      }
      int64_t at = begin;
      for (; at + L <= stop; at += L) store<L>(a.alpha + at, exponential<T, L>(load<L>(a.alpha + at)));
      for (; at < stop; ++at) a.alpha[at] = exponential<T, 1>(a.alpha[at]);
      for (int64_t head = 0; a.loop && head < heads; ++head) {
        a.alpha[own + head] = loop ? exponential<T, 1>(a.logits[own + head] - largest[head]) : T{0};
        sum[head] = a.alpha[own + head];
      }
      for (at = begin; at < stop; at += heads) {
        for (int64_t head = 0; head < heads; ++head) sum[head] += a.alpha[at + head];
      }
      for (int64_t head = 0; head < heads; ++head) sum[head] = sum[head] == 0 ? T{0} : 1 / sum[head];
      for (at = begin; at < stop; at += heads) {
        for (int64_t head = 0; head < heads; ++head) a.alpha[at + head] *= sum[head];
      }
      for (int64_t head = 0; a.loop && head < heads; ++head) a.alpha[own + head] *= sum[head];
    }
  });
}

template <class T, class I>
void drop_edges(const DropEdges<T, I>& a) {
  const int64_t num_edges = a.indptr[a.num_targets];
  for_row_blocks(a.indptr, a.num_targets, a.num_threads, [&](int64_t first, int64_t end) {
    EdgeMask mask(&a.dropout);
    const auto flip = [&](int64_t row, const I* indices, int64_t count, int64_t edge) {
      mask.template draw<false>(row, indices, count, false);
      T* alpha = a.alpha + edge * a.num_heads;
      for (int64_t e = 0; e < count; ++e) {
        for (int64_t head = 0; head < a.num_heads; ++head, ++alpha) *alpha = mask.drops(e, head) ? -*alpha : *alpha;
      }
    };
    for (int64_t row = first; row < end; ++row) {
      mask.begin();
      for (int64_t entry = a.indptr[row]; entry < a.indptr[row + 1]; entry += kChunk) {
        const int64_t left = a.indptr[row + 1] - entry;
        flip(row, a.indices + entry, left < kChunk ? left : kChunk, entry);
      }
      if (!a.loop || !a.loop[row]) continue;
      const I self = static_cast<I>(row);
      mask.begin();
      flip(row, &self, 1, num_edges + row);
    }
  });
}

template <class T>
WEFT_INLINE T magnitude(T alpha) {
  return alpha < 0 ? -alpha : alpha;
}

// Weighted sums for rows of the matrix (targets, or sources of the transpose) and one group of heads.
template <class T, class I>
struct WeighRows {
  const Weigh<T, I>& a;
  const Plan<ChunkRows<T, I, false>>& plan;
  const int64_t head = plan.first(), num_heads = plan.num_heads(), num_edges = a.indptr[a.num_rows];
  Chunk<T, I> chunk{};
  alignas(64) Weights<T> weight;

  WeighRows(const Weigh<T, I>& args, const Plan<ChunkRows<T, I, false>>& columns) : a(args), plan(columns) {
    chunk.weight = &weight;
    chunk.x = a.x;
    chunk.width = a.width;
  }

  void run(int64_t first_row, int64_t end_row) {
    chunk.last_index = a.indices + num_edges - 1;
    for (int64_t row = first_row; row < end_row; ++row) {
      chunk.y = a.y + row * a.width;
      chunk.first = true;
      for_chunks(a.indptr, a.indices, row, row < a.num_loops && a.loop[row], chunk, [&](bool) {
        const int64_t entry = chunk.indices - a.indices;
        for (int64_t e = 0; e < chunk.count; ++e) take(e, a.has_ids ? a.edge_ids[entry + e] : entry + e);
        if (chunk.own >= 0) take(chunk.count, num_edges + row);
        if (a.scale != 1) drop(chunk.num_entries());
        plan.run(chunk);
      });
      if (!chunk.first) continue;
      for (int64_t column = a.bounds[head]; column < a.bounds[head + num_heads]; ++column) chunk.y[column] = 0;
    }
  }

  void take(int64_t e, int64_t edge) {
    const T* alpha = a.alpha + edge * a.num_heads + head;
    for (int64_t j = 0; j < num_heads; ++j) weight[j][e] = alpha[j];
  }

  void drop(int64_t count) {
    for (int64_t j = 0; j < num_heads; ++j) {
      for (int64_t e = 0; e < count; ++e) weight[j][e] = weight[j][e] < 0 ? T{0} : weight[j][e] * a.scale;
    }
  }
};

template <class T, class I>
void weigh(const Weigh<T, I>& a) {
  for (int64_t head = 0; head < a.num_heads; head += kHeads) {
    const Plan<ChunkRows<T, I, false>> plan(a.bounds, head, head + kHeads < a.num_heads ? head + kHeads : a.num_heads);
    for_row_blocks(a.indptr, a.num_rows, a.num_threads,
                   [&](int64_t first, int64_t end) { WeighRows<T, I>(a, plan).run(first, end); });
  }
}

// Adds the gradient of one step's result to the gradient of alpha. The last step turns the sum into the gradient of the
// logits: alpha_e (g_e - sum over the row of alpha g).
template <class T, class I>
void weigh_backward(const WeighBackward<T, I>& a) {
  const int64_t heads = a.num_heads, width = a.width, num_edges = a.indptr[a.num_targets];
  for_row_blocks(a.indptr, a.num_targets, a.num_threads, [&](int64_t first, int64_t end) {
    const Scratch<T> scratch(heads);
    T* dot = scratch.numbers;
    for (int64_t row = first; row < end; ++row) {
      const bool loop = a.loop && a.loop[row];
      const T* grad_y = a.grad_y + row * width;
      for (int64_t head = 0; head < heads; ++head) dot[head] = 0;
      const auto same = [](int64_t entry) { return entry; };
      for_entries(a.indptr, a.indices, a.num_targets, row, loop, same,
                  [&](int64_t source, int64_t edge, int64_t ahead) {
                    prefetch_row(a.x + ahead * width, width);
                    const T *x = a.x + source * width, *alpha = a.alpha + edge * heads;
                    T* grad = a.grad_logits + edge * heads;
                    for (int64_t head = 0; head < heads; ++head) {
                      T sum = 0;
#pragma omp simd reduction(+ : sum)
                      for (int64_t column = a.bounds[head]; column < a.bounds[head + 1]; ++column) {
                        sum += grad_y[column] * x[column];
                      }
                      grad[head] += alpha[head] < 0 ? T{0} : sum * a.scale;
                      dot[head] += magnitude(alpha[head]) * grad[head];
                    }
                  });
      if (!a.last) continue;
      for_entries(a.indptr, a.indices, a.num_targets, row, loop, same, [&](int64_t, int64_t edge, int64_t) {
        const T* alpha = a.alpha + edge * heads;
        T* grad = a.grad_logits + edge * heads;
        for (int64_t head = 0; head < heads; ++head) {
          grad[head] = magnitude(alpha[head]) * (grad[head] - dot[head]);
        }
      });
      for (int64_t head = 0; a.loop && !loop && head < heads; ++head) a.grad_logits[(num_edges + row) * heads + head] = 0;
    }
  });
}

}  // namespace weft::WEFT_ISA
