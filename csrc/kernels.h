// The arguments of the kernels, and the table of kernels that each instruction set fills (csrc/kernels.cpp).
//
// Sizes: n rows (targets), s neighbours (sources), E entries, F columns, H heads. All matrices are row-major without
// padding. Pointers are not null unless stated otherwise. One thread sums each row in the order of its entries, so
// results are bitwise equal for any number of threads.
#pragma once

#include <cstdint>

namespace weft {

// bfloat16: the upper 16 bits of a float.
struct BFloat16 {
  uint16_t bits;
};

// The type in which numbers of type R are summed: float for bfloat16, otherwise R.
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

// Positions of the transpose's entries among the forward edges. Their type depends on the number of edges, that of the
// indices on the number of vertices.
struct EdgeIds {
  const int32_t* narrow;
  const int64_t* wide;
  int64_t operator[](int64_t entry) const { return narrow ? narrow[entry] : wide[entry]; }
};

// y_r = row_scale_r * sum_e weight_e neighbour_scale_u x_u + loop_scale_r x_r, where the sum is over the entries e of
// row r and u = indices[e]. Factors that are null are 1; loop_scale null: no self-loops. Y is R, or the type of the
// sums. Rows of x are x_stride numbers apart. Kernels may read the columns before `readable`, which is at least
// `width`.
template <class R, class Y, class I>
struct Spmm {
  using T = Sum<R>;
  int64_t num_rows, width, x_stride, readable;
  const int64_t* indptr;
  const I* indices;
  const T *weight, *neighbour_scale, *row_scale, *loop_scale;
  int64_t num_loops;  // length of loop_scale, which is for the first rows
  const R* x;
  Y* y;
  bool add;  // add to y instead of overwriting it
  int num_threads;
};

// y_v += target_scale_v weight_e row_scale_r x_r for each entry e of each row r of x, where v = indices[e]. Factors that
// are null are 1.
template <class R, class I>
struct Scatter {
  using T = Sum<R>;
  int64_t num_rows, width, x_stride;
  const int64_t* bounds;  // range of targets of each thread, [num_threads + 1]
  const int64_t* indptr;
  const I* indices;
  const T *weight, *row_scale, *target_scale;
  const R* x;
  T* y;
  int num_threads;
};

// The integer type as wide as T, so that vectors of numbers and of positions have the same number of lanes.
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

// y_r = max_e x_u for each column; 0 if row r is empty. position [n, F]: index of the first maximum among the entries
// of the row.
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

// Backward of SpmmMax, over the transpose: grad_x_u = sum of grad_y_r over the entries (r, u) that are the maximum.
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

// Dropout of attention weights: the weight of an entry and head becomes 0 if a hash of (key, id of the target, id of
// the source, copy, first_head + head) is below the threshold; other weights are multiplied by `scale`. copy: number of
// previous entries with the same endpoints (parallel edges are next to each other).
struct EdgeDropout {
  const int64_t *source_ids, *target_ids;
  uint64_t key;
  uint32_t first_head, threshold;
  double scale;
};

// Attention of GAT, for each head:
//
//   alpha_e = exp(leaky_relu(logit_src_u + logit_dst_v) - lse_v)   softmax over the edges e from u into v
//   lse_v                                                          log of the sum of exponentials; 0 if all are 0
//   y_v = sum_e alpha_e h_u                                        over the head's columns [bounds[j], bounds[j + 1])
//
// lse is written, or read if lse_known. For the backward pass, unless null:
//
//   plus_v  = sum of alpha_e h_u over the edges with a positive argument of leaky_relu
//   share_v = sum of these alpha_e; written together with lse
//
// Dropout applies to alpha_e in the sums of rows, after the softmax; it does not change lse and share.
template <class R, class I>
struct Attend {
  using T = Sum<R>;
  int64_t num_targets, num_heads, width;
  const int64_t* indptr;
  const I* indices;
  const R *logit_src, *logit_dst;
  const bool* loop;  // [n] or null: whether v also has a self-loop
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

// Prepares the backward pass of Attend: fills stats [n, 3, H] with logit_dst, lse, and the dot product of grad_y and y
// over the columns of the head; adds to grad_logit_dst. grad_y and the pointers after it may all be null; the dot
// products are then 0.
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

// Backward of Attend, over the transpose: writes grad_h (or adds to it), and adds to grad_logit_src. h and
// grad_logit_src are null if the latter is not needed.
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
  bool add;                    // add to grad_h instead of overwriting it
  const EdgeDropout* dropout;  // or null
  int num_threads;
};

// Logits that depend on both endpoints of an edge e from u to v (GATv2), for head j:
//
//   z_e = left_u + right_v + features_e edge_map
//   logit_ej = sum over the columns c of head j of attention_c leaky_relu(z_ec)
//
// features [E, K] and loop_features [n, K] may be null if K is 0.
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

// Backward of the logits of Pairs: writes all gradients. Logits are [E + n, H], the edges and then the loops; without
// loops [E, H].
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

// alpha = softmax of the logits over the edges of each target; both are [E + n, H].
template <class T>
struct EdgeSoftmax {
  int64_t num_targets, num_heads;
  const int64_t* indptr;
  const bool* loop;
  const T* logits;
  T* alpha;
  int num_threads;
};

// Marks dropped weights by their sign: alpha [E + n, H] becomes -alpha where dropout drops it.
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

// y_r = sum_e alpha_e x_u for each head. Negative alpha_e are dropped (DropEdges); others are multiplied by `scale`.
// Over the transpose, edge_ids has the forward edge of each entry (has_ids).
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

// Backward of Weigh and EdgeSoftmax. Each step adds grad_y_v . x_u of each head to grad_logits [E + n, H], which then
// is the gradient g of alpha. The last step (`last`) turns it into that of the logits: alpha_e (g_e - sum over the row
// of alpha g).
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

// y_rc = x_rc * scale if the hash of (key, rows[r], first_column + c) is at least the threshold, else 0. With relu,
// max(x_rc, 0) replaces x_rc.
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

// Backward of Dropout with relu, from its result y: the gradient is 0 where y is 0 (dropped, or cut off by ReLU).
template <class R>
struct ReluDropoutBackward {
  int64_t size;
  const R *y, *grad_y;
  Sum<R> scale;
  R* grad_x;
  int num_threads;
};

// An operation of a program over messages (csrc/messages.h). Values are in the slots `a`, `b`, `c` and `out` of a thread's
// memory, or in the tensors of these numbers.
//
//   kLoad..., kStore...  out = tensor a of the rows' sources, edges or targets; tensor out = a
//   kSpread              out_e = a_t for each edge e into target t
//   kReduce              out_t = function over a_e
//   kCombine             out = function(a, b); p = mode, columns of a block. Functions of one argument ignore b
//   kChoose              out = b where a is not 0, else c; p = whether b, or c, is the constant
//   kReduceColumns       out = function over the middle one of the dimensions p of a row
//   kCopy                a block of a row; p = width of rows before and after, first columns, three sizes, three strides,
//                        whether `a` is a tensor
//   kFill                out = constant
//   kMatmul              out = a b with the tensor b; p = columns of a
//   kMultiplyEach        out = a b for matrices in each row; p = their sizes
//   kTotalProduct        total at out += a^T b; p = columns of a and of b
//   kTotal               total at out += sum of the rows of a
enum MessageKind : int64_t {
  kLoadSource, kLoadEdge, kLoadTarget, kStoreSource, kStoreEdge, kStoreTarget, kSpread, kReduce, kCombine, kChoose,
  kReduceColumns, kCopy, kFill, kMatmul, kMultiplyEach, kTotalProduct, kTotal
};
enum MessageFunction : int64_t {
  kAdd, kSubtract, kSubtractFrom, kMultiply, kDivide, kDivideInto, kMaximum, kMinimum, kEqual, kUnequal, kLess,
  kLessEqual, kGreater, kGreaterEqual, kExp, kLog, kRoot, kSigmoid, kTanh, kAbsolute, kLog1p, kExpm1, kErf, kSine,
  kCosine
};
// The second argument of kCombine: a number for each number of a, the constant, a number for each block of columns, or a
// row of the tensor b for all rows.
enum MessageMode : int64_t { kWhole, kConstant, kPerBlock, kPerRow };

struct MessageOperation {
  int64_t kind, function;
  int64_t level;     // length of the longest chain of reductions before it
  int64_t once;      // runs only at its level, because it adds to a result or writes one
  int64_t of_edges;  // its rows are edges; otherwise targets
  int64_t width;     // columns of its result
  int64_t out, a, b, c;
  int64_t p[11];
};

struct MessageTile {
  int64_t first_target, end_target, first_edge, end_edge;
};

// Runs a program on all edges, which are sorted by target. All tensors have numbers of the type T.
template <class T>
struct MessageRun {
  const MessageOperation* operations;
  const double* constants;  // one for each operation
  int64_t num_operations;
  const int64_t* slot_offset;
  T* memory;  // of all threads
  int64_t memory_per_thread;
  T* const* tensors;
  const int64_t *indptr, *sources, *order;  // order: original positions of the edges, or null
  int64_t capacity;                         // edges that fit in the memory of a thread
  int64_t num_levels;
  const bool* levels;  // whether an operation of edges has this level
  const MessageTile* tiles;
  const int64_t* supers;  // first tile of each super-tile
  int64_t num_supers, num_groups;
  T* const* staging;  // for each tensor that is added to by source: a row for each edge of a super-tile
  int64_t num_staged;
  const int64_t *staged_width, *staged_tensor;
  T *totals, *group_totals;
  int64_t num_totals;
  int num_threads;

  int64_t edge(int64_t position) const { return order ? order[position] : position; }
};

// Kernels that also exist for low-precision rows (bfloat16), which they sum in float32.
template <class R, class I>
struct SumKernels {
  void (*spmm)(const Spmm<R, R, I>&);
  void (*spmm_wide)(const Spmm<R, Sum<R>, I>&);
  void (*scatter)(const Scatter<R, I>&);
  void (*attend)(const Attend<R, I>&);
  void (*attend_backward)(const AttendBackward<R, I>&);
};

template <class R>
struct RowKernels {
  void (*attend_stats)(const AttendStats<R>&);
  void (*dropout)(const Dropout<R>&);
  void (*relu_dropout_backward)(const ReluDropoutBackward<R>&);
};

template <class T>
struct MessageKernels {
  void (*run_messages)(const MessageRun<T>&);
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

// All kernels. To get a table, cast to its type: static_cast<const SumKernels<float, int32_t>&>(kernels).
struct Kernels : SumKernels<float, int32_t>,
                 SumKernels<float, int64_t>,
                 SumKernels<double, int32_t>,
                 SumKernels<double, int64_t>,
                 SumKernels<BFloat16, int32_t>,
                 SumKernels<BFloat16, int64_t>,
                 RowKernels<float>,
                 RowKernels<double>,
                 RowKernels<BFloat16>,
                 MessageKernels<float>,
                 MessageKernels<double>,
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
