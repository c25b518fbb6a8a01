// What a kernel is given, and the table of kernels that each instruction set fills (csrc/kernels.cpp).
//
// n rows (targets), s neighbours (sources), E entries, F columns, H heads. All matrices are row-major without gaps. A
// pointer that may be null says so. Every row is summed by one thread in the order of its entries, so that results have
// the same bits whatever the number of threads.
#pragma once

#include <cstdint>

namespace weft {

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

// The type in which numbers of a type are summed.
template <class R>
struct SumOf {
  using type = R;
};
template <>
struct SumOf<BFloat16> {
  using type = float;
};
template <class R>
using Sum = typename SumOf<R>::type;

// Positions among the forward edges; as wide as the number of edges asks for, which is not the width of the indices.
struct EdgeIds {
  const int32_t* narrow;
  const int64_t* wide;
  int64_t operator[](int64_t entry) const { return narrow ? narrow[entry] : wide[entry]; }
};

// y_r = row_scale_r * sum_e weight_e neighbour_scale_u x_u + loop_scale_r x_r, u = indices[e]; factors may be null. Y is R
// or wider. Rows of x begin x_stride numbers apart, and their columns before `readable`, at least `width`, may be read.
template <class R, class Y, class I>
struct Spmm {
  using T = Sum<R>;
  int64_t num_rows, width, x_stride, readable;
  const int64_t* indptr;
  const I* indices;
  const T *weight, *neighbour_scale, *row_scale, *loop_scale;
  int64_t num_loops;  // loop_scale is for the first rows only
  const R* x;
  Y* y;
  bool add;  // to what y has
  int num_threads;
};

// The integer as wide as T, which lets a vector of T and the positions of its maxima share their lanes.
template <class T>
struct Position;
template <>
struct Position<float> {
  using type = int32_t;
};
template <>
struct Position<double> {
  using type = int64_t;
};

// y_r = max_e x_u, by column, 0 where row r is empty; position [n, F] is the place of the first maximum in its row.
template <class T, class I>
struct SpmmMax {
  int64_t num_rows, width;
  const int64_t* indptr;
  const I* indices;
  const T* x;
  T* y;
  typename Position<T>::type* position;
  int num_threads;
};

// Backward of SpmmMax, over the transpose: grad_x_u = sum of grad_y_r where the entry (r, u) holds the maximum.
template <class T, class I>
struct SpmmMaxBackward {
  int64_t num_sources, width;
  const int64_t *indptr, *indptr_t;
  const I* indices_t;
  EdgeIds edge_ids;
  const typename Position<T>::type* position;
  const T* grad_y;
  T* grad_x;
  int num_threads;
};

// Drops the weight of an entry by head where a hash of (key, target's id, source's id, copy, first_head + head) is below
// the threshold, and scales the others. copy: of entries that join the same ends, which stand side by side, how many come
// before.
struct EdgeDropout {
  const int64_t *source_ids, *target_ids;
  uint64_t key;
  uint32_t first_head, threshold;
  double scale;
};

// y_v = sum_e alpha_e h_u, alpha_e = exp(leaky_relu(logit_src_u + logit_dst_v) - lse_v) and lse_v what makes them sum
// to 1; head j owns columns [bounds[j], bounds[j + 1]) of h. lse is written, or read where lse_known; 0 where nothing
// has any weight. For the backward pass, unless null: plus_v = sum of alpha_e h_u where leaky_relu's argument is
// positive, and share_v, which is written with lse, the sum of those alpha_e. With dropout the alpha_e of the sums of rows
// are dropped, after the softmax: lse and share_v know nothing of it.
template <class R, class I>
struct Attend {
  using T = Sum<R>;
  int64_t num_targets, num_heads, width;
  const int64_t* indptr;
  const I* indices;
  const R *logit_src, *logit_dst;
  const bool* loop;  // [n] or null: whether v has one more edge, from itself
  const int64_t* bounds;
  T slope;
  const R* h;
  bool lse_known;
  T* lse;
  R *y, *plus;
  T* share;
  const EdgeDropout* dropout;  // or null
  int num_threads;
};

// What the backward pass gathers by target, stats [n, 3, H]: logit_dst, lse, and the dot product of grad_y and y over
// the head's columns. Adds to grad_logit_dst. From grad_y on all may be null together; then the dot products are 0.
template <class R>
struct AttendStats {
  using T = Sum<R>;
  int64_t num_targets, num_heads, width;
  const R* logit_dst;
  const T* lse;
  const int64_t* bounds;
  T slope;
  T* stats;
  const R *grad_y, *y, *plus;
  const T* share;
  T* grad_logit_dst;
  int num_threads;
};

// Backward of Attend, over the transpose: writes grad_h, or adds to it, adds to grad_logit_src (null, with h, where it
// is not needed).
template <class R, class I>
struct AttendBackward {
  using T = Sum<R>;
  int64_t num_sources, num_targets, num_heads, width;
  const int64_t* indptr_t;
  const I* indices_t;
  const R* logit_src;
  const T* stats;
  const bool* loop;
  const int64_t* bounds;
  T slope;
  const R *h, *grad_y;
  R* grad_h;
  T* grad_logit_src;
  bool add;                    // to what grad_h has
  const EdgeDropout* dropout;  // or null
  int num_threads;
};

// Edges whose logits need both ends: logit_ej = sum over head j's columns c of attention_c leaky_relu(z_ec), where
// z_e = left_u + right_v + features_e edge_map. features [E, K] and loop_features [n, K] may be null where K is 0.
template <class T, class I>
struct Pairs {
  int64_t num_targets, num_heads, width, num_features;
  const int64_t* indptr;
  const I* indices;
  const bool* loop;  // [n] or null, as in Attend
  const int64_t* bounds;
  T slope;
  const T *left, *right, *attention, *features, *loop_features, *edge_map;
  int num_threads;
};

// Backward of the logits [E + n, H] of Pairs (the edges', then the loops'; [E, H] without loops): writes all gradients.
template <class T, class I>
struct PairsBackward {
  Pairs<T, I> pairs;
  int64_t num_sources;
  const int64_t* indptr_t;
  const I* indices_t;
  EdgeIds edge_ids;
  const T* grad_logits;
  T *grad_left, *grad_right, *grad_attention, *grad_edge_map;
};

// alpha = the softmax of logits over the edges of each target, both [E + n, H].
template <class T>
struct EdgeSoftmax {
  int64_t num_targets, num_heads;
  const int64_t* indptr;
  const bool* loop;
  const T* logits;
  T* alpha;
  int num_threads;
};

// alpha [E + n, H] = -alpha where dropped.
template <class T, class I>
struct DropEdges {
  int64_t num_targets, num_heads;
  const int64_t* indptr;
  const I* indices;
  const bool* loop;
  EdgeDropout dropout;
  T* alpha;
  int num_threads;
};

// y_r = sum_e alpha_e x_u, by head; what is negative is dropped, the others are scaled. Over the transpose with
// the edge ids of its entries (has_ids).
template <class T, class I>
struct Weigh {
  int64_t num_rows, num_heads, width;
  const int64_t* indptr;
  const I* indices;
  bool has_ids;
  EdgeIds edge_ids;
  const bool* loop;
  int64_t num_loops;  // flags in loop
  const int64_t* bounds;
  const T *alpha, *x;
  T scale;
  T* y;
  int num_threads;
};

// Backward of Weigh and EdgeSoftmax: adds grad_y_v . x_u by head to grad_logits [E + n, H], which after the last of
// several steps becomes alpha (itself - its mean by alpha over the row).
template <class T, class I>
struct WeighBackward {
  int64_t num_targets, num_heads, width;
  const int64_t* indptr;
  const I* indices;
  const bool* loop;
  const int64_t* bounds;
  const T *alpha, *x, *grad_y;
  T scale;
  bool last;
  T* grad_logits;
  int num_threads;
};

// y_rc = x_rc * scale where the hash of (key, rows[r], first_column + c) is at least the threshold, else 0; with relu,
// of max(x_rc, 0).
template <class R>
struct Dropout {
  int64_t num_rows, width;
  const R* x;
  const int64_t* rows;
  uint64_t key;
  uint32_t first_column, threshold;
  Sum<R> scale;
  bool relu;
  R* y;
  int num_threads;
};

// Backward of Dropout with relu, from its result: what is not positive was dropped, or cut off.
template <class R>
struct ReluDropoutBackward {
  int64_t size;
  const R *y, *grad_y;
  Sum<R> scale;
  R* grad_x;
  int num_threads;
};

// Of rows that may be narrower than the numbers that they are summed in.
template <class R, class I>
struct SumKernels {
  void (*spmm)(const Spmm<R, R, I>&);
  void (*spmm_wide)(const Spmm<R, Sum<R>, I>&);
  void (*attend)(const Attend<R, I>&);
  void (*attend_backward)(const AttendBackward<R, I>&);
};

template <class R>
struct RowKernels {
  void (*attend_stats)(const AttendStats<R>&);
  void (*dropout)(const Dropout<R>&);
  void (*relu_dropout_backward)(const ReluDropoutBackward<R>&);
};

template <class T, class I>
struct GraphKernels {
  void (*spmm_max)(const SpmmMax<T, I>&);
  void (*spmm_max_backward)(const SpmmMaxBackward<T, I>&);
  void (*pair_logits)(const Pairs<T, I>&, T* logits);
  void (*pair_backward)(const PairsBackward<T, I>&);
  void (*edge_softmax)(const EdgeSoftmax<T>&);
  void (*drop_edges)(const DropEdges<T, I>&);
  void (*weigh)(const Weigh<T, I>&);
  void (*weigh_backward)(const WeighBackward<T, I>&);
};

// Each table is had by its type: static_cast<const SumKernels<float, int32_t>&>(kernels).
struct Kernels : SumKernels<float, int32_t>,
                 SumKernels<float, int64_t>,
                 SumKernels<double, int32_t>,
                 SumKernels<double, int64_t>,
                 SumKernels<BFloat16, int32_t>,
                 SumKernels<BFloat16, int64_t>,
                 RowKernels<float>,
                 RowKernels<double>,
                 RowKernels<BFloat16>,
                 GraphKernels<float, int32_t>,
                 GraphKernels<float, int64_t>,
                 GraphKernels<double, int32_t>,
                 GraphKernels<double, int64_t> {};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace weft
