// Messages over edges: runs a program of operations on rows, tile by tile (weft/nn/messages/program.py writes it).
//
// A tile is a range of targets with all of their in-edges. Each value of a program is a matrix in the memory of a
// thread with a row for each edge, or each target, of the tile. So the passes of a program over its values stay in the
// cache, and the memory does not depend on the number of edges, but for gradients of sources (`staging`).
#pragma once

#include <omp.h>

#include "exp.h"
#include "vectors.h"

namespace weft::WEFT_ISA {

// 1. Bits below the leading 1 of x are its mantissa m in [sqrt(1/2), sqrt(2)), the others its exponent n.
// 2. log m = 2 artanh(s) with s = (m - 1) / (m + 1), so |s| < 0.172: an odd series of few terms.
// 3. log x = n ln 2 + log m. Subnormal numbers count as the smallest normal one; 0 gives -inf and negative numbers NaN.
template <class T, int L>
WEFT_INLINE Vector<T, L> log_vector(Vector<T, L> x) {
  using E = Exponential<T>;
  using V = Vector<T, L>;
  using Bits = Vector<typename E::Bits, L>;
  constexpr int terms = sizeof(T) == 4 ? 5 : 11;
  constexpr typename E::Bits mantissa = (typename E::Bits{1} << E::mantissa_bits) - 1;
  const V zero{}, one = zero + T{1}, root = zero + static_cast<T>(1.4142135623730951);
  Bits bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  Bits exponent = (bits >> E::mantissa_bits) - E::bias;
  bits = (bits & mantissa) | (typename E::Bits{E::bias} << E::mantissa_bits);
  V m;
  __builtin_memcpy(&m, &bits, sizeof(m));
  const auto high = m > root;
  m = high ? m * T{0.5} : m;
  V n = __builtin_convertvector(exponent, V);
  n = high ? n + one : n;
  const V s = (m - one) / (m + one), square = s * s;
  V sum = zero + T{1} / (2 * terms - 1);
#pragma GCC unroll 16
  for (int term = terms - 1; term > 0; --term) sum = sum * square + T{1} / (2 * term - 1);
  const V result = n * E::ln2_high + (n * E::ln2_low + T{2} * s * sum);
  const V infinite = zero + static_cast<T>(__builtin_inf()), undefined = zero + static_cast<T>(__builtin_nan(""));
  const V finite = x == infinite ? infinite : result;
  return x > zero ? finite : (x == zero ? -infinite : undefined);
}

template <class T, int L>
WEFT_INLINE Vector<T, L> root_of(Vector<T, L> x) {
  Vector<T, L> y;
  for (int lane = 0; lane < L; ++lane) y[lane] = sizeof(T) == 4 ? __builtin_sqrtf(x[lane]) : __builtin_sqrt(x[lane]);
  return y;
}

// Near 0, where 1 - 2 / (1 + e^2x) loses digits, three terms of the series.
template <class T, int L>
WEFT_INLINE Vector<T, L> tanh_vector(Vector<T, L> x) {
  using V = Vector<T, L>;
  const V zero{}, limit = zero + T{0.01}, square = x * x;
  const V far = T{1} - T{2} / (T{1} + exponential<T, L>(x + x));
  const V near = x * (T{1} - square * (T{1} / T{3} - square * (T{2} / T{15})));
  return (x < limit) & (x > -limit) ? near : far;
}

// With u = 1 + x rounded, log(1 + x) = log u x / (u - 1) but for the rounding of log u.
template <class T, int L>
WEFT_INLINE Vector<T, L> log1p_vector(Vector<T, L> x) {
  using V = Vector<T, L>;
  const V zero{}, one = zero + T{1}, u = one + x, rounded = u - one, logarithm_of = log_vector<T, L>(u);
  const V factor = rounded == x ? one : x / (rounded == zero ? one : rounded);  // 1 also where x is infinite
  return rounded == zero ? x : logarithm_of * factor;
}

// Near 0, with u = e^x rounded, e^x - 1 = (u - 1) x / log u but for the rounding of u.
template <class T, int L>
WEFT_INLINE Vector<T, L> expm1_vector(Vector<T, L> x) {
  using V = Vector<T, L>;
  const V zero{}, one = zero + T{1}, u = exponential<T, L>(x), far = u - one;
  const V near = u == one ? x : far * (x / (u == one ? one : log_vector<T, L>(u)));
  return x * x < zero + T{0.25} ? near : far;
}

WEFT_INLINE float error_function(float x) { return __builtin_erff(x); }
WEFT_INLINE double error_function(double x) { return __builtin_erf(x); }
WEFT_INLINE float sine(float x) { return __builtin_sinf(x); }
WEFT_INLINE double sine(double x) { return __builtin_sin(x); }
WEFT_INLINE float cosine(float x) { return __builtin_cosf(x); }
WEFT_INLINE double cosine(double x) { return __builtin_cos(x); }

// Calls a function of the mathematical library for each lane.
template <class T, int L, class F>
WEFT_INLINE Vector<T, L> by_lane(F f, Vector<T, L> x) {
  Vector<T, L> y;
  for (int lane = 0; lane < L; ++lane) y[lane] = f(x[lane]);
  return y;
}

// The rows of a tile, or of a part of a target that has too many edges for one.
struct TileRows {
  const int64_t* indptr;
  int64_t first_target, num_targets, first_edge, num_edges;
  bool adds;  // whether reductions add to the result of the parts before
  bool last;  // whether no part follows

  int64_t begin(int64_t target) const {
    const int64_t edge = indptr[first_target + target] - first_edge;
    return edge > 0 ? edge : 0;
  }
  int64_t end(int64_t target) const {
    const int64_t edge = indptr[first_target + target + 1] - first_edge;
    return edge < num_edges ? edge : num_edges;
  }
};

// Calls f on whole vectors. Results may exceed the last row by less than a vector, and each row the next one, which is
// written later; slots have room for this, and no operation writes a slot that it reads.
template <class T, class F>
WEFT_INLINE void combine(F f, int64_t mode, const T* a, const T* b, T constant, T* out, int64_t count, int64_t inner) {
  constexpr int L = kLanes<T>;
  using V = Vector<T, L>;
  if (mode == kWhole) {
    for (int64_t i = 0; i < count; i += L) store<L>(out + i, f(load<L>(a + i), load<L>(b + i)));
  } else if (mode == kConstant) {
    const V c = V{} + constant;
    for (int64_t i = 0; i < count; i += L) store<L>(out + i, f(load<L>(a + i), c));
  } else if (mode == kPerBlock) {
    for (int64_t i = 0; i < count; i += inner, ++b) {
      const V c = V{} + *b;
      for (int64_t j = 0; j < inner; j += L) store<L>(out + i + j, f(load<L>(a + i + j), c));
    }
  } else {
    for (int64_t i = 0; i < count; i += inner) {
      for (int64_t j = 0; j < inner; j += L) store<L>(out + i + j, f(load<L>(a + i + j), load<L>(b + j)));
    }
  }
}

#define WEFT_LAMBDA(...) [](auto x, auto y) __attribute__((always_inline)) { (void)y; return __VA_ARGS__; }
#define WEFT_CASE(name, ...)                                                              \
  case name:                                                                              \
    combine<T>(WEFT_LAMBDA(__VA_ARGS__), mode, a, b, constant, out, count, inner);        \
    break;

template <class T>
void combine_rows(int64_t function, int64_t mode, const T* a, const T* b, T constant, T* out, int64_t count,
                  int64_t inner) {
  constexpr int L = kLanes<T>;
  using V = Vector<T, L>;
  static constexpr V zero{};
  switch (function) {
    WEFT_CASE(kAdd, x + y)
    WEFT_CASE(kSubtract, x - y)
    WEFT_CASE(kSubtractFrom, y - x)
    WEFT_CASE(kMultiply, x* y)
    WEFT_CASE(kDivide, x / y)
    WEFT_CASE(kDivideInto, y / x)
    WEFT_CASE(kMaximum, (y > x) | (y != y) ? y : x)  // NaN stays NaN
    WEFT_CASE(kMinimum, (y < x) | (y != y) ? y : x)
    WEFT_CASE(kEqual, x == y ? zero + T{1} : zero)
    WEFT_CASE(kUnequal, x != y ? zero + T{1} : zero)
    WEFT_CASE(kLess, x < y ? zero + T{1} : zero)
    WEFT_CASE(kLessEqual, x <= y ? zero + T{1} : zero)
    WEFT_CASE(kGreater, x > y ? zero + T{1} : zero)
    WEFT_CASE(kGreaterEqual, x >= y ? zero + T{1} : zero)
    WEFT_CASE(kExp, exponential<T, L>(x))
    WEFT_CASE(kLog, log_vector<T, L>(x))
    WEFT_CASE(kRoot, root_of<T, L>(x))
    WEFT_CASE(kSigmoid, T{1} / (T{1} + exponential<T, L>(-x)))
    WEFT_CASE(kTanh, tanh_vector<T, L>(x))
    WEFT_CASE(kAbsolute, x < zero ? -x : x)
    WEFT_CASE(kLog1p, log1p_vector<T, L>(x))
    WEFT_CASE(kExpm1, expm1_vector<T, L>(x))
    WEFT_CASE(kErf, by_lane<T, L>([](T lane) { return error_function(lane); }, x))
    WEFT_CASE(kSine, by_lane<T, L>([](T lane) { return sine(lane); }, x))
    WEFT_CASE(kCosine, by_lane<T, L>([](T lane) { return cosine(lane); }, x))
    default:
      break;
  }
}

#undef WEFT_CASE
#undef WEFT_LAMBDA

template <class T>
WEFT_INLINE void copy_row(const T* from, T* to, int64_t width) {
  constexpr int L = kLanes<T>;
  for (int64_t j = 0; j < width; j += L) store_first<L>(to + j, load_first<L>(from + j, width - j), width - j);
}

template <class T>
WEFT_INLINE void add_row(const T* from, T* to, int64_t width) {
  constexpr int L = kLanes<T>;
  for (int64_t j = 0; j < width; j += L) {
    const int64_t count = width - j;
    store_first<L>(to + j, load_first<L>(to + j, count) + load_first<L>(from + j, count), count);
  }
}

// out_mn (+)= sum_k a_mk b_kn for R rows; a_mk is at a[m * row + k * column], rows of b are N numbers apart. Reads b up
// to a vector after its end.
template <int R, class T>
WEFT_INLINE void multiply_rows(const T* a, int64_t row, int64_t column, const T* b, int64_t K, int64_t N, T* out,
                               bool add) {
  constexpr int L = kLanes<T>, kVectors = kMaxVectors / 4;
  using V = Vector<T, L>;
  for (int64_t first = 0; first < N; first += kVectors * L) {
    V sums[R][kVectors] = {};
    if (first + (kVectors - 1) * L < N) {
      for (int64_t k = 0; k < K; ++k) {
        V values[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) values[v] = load<L>(b + k * N + first + v * L);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const T factor = a[r * row + k * column];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * values[v];
        }
      }
    } else {
      for (int64_t k = 0; k < K; ++k) {
        for (int v = 0; v < kVectors && first + v * L < N; ++v) {
          const V value = load<L>(b + k * N + first + v * L);
          for (int r = 0; r < R; ++r) sums[r][v] += a[r * row + k * column] * value;
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors && first + v * L < N; ++v) {
        T* const to = out + r * N + first + v * L;
        const int64_t count = N - first - v * L;
        store_first<L>(to, add ? sums[r][v] + load_first<L>(to, count) : sums[r][v], count);
      }
    }
  }
}

template <class T>
void multiply(const T* a, int64_t row, int64_t column, const T* b, int64_t M, int64_t K, int64_t N, T* out, bool add) {
  int64_t m = 0;
  for (; m + 4 <= M; m += 4) multiply_rows<4, T>(a + m * row, row, column, b, K, N, out + m * N, add);
  for (; m < M; ++m) multiply_rows<1, T>(a + m * row, row, column, b, K, N, out + m * N, add);
}

// out_t = the sum, largest or smallest of the rows of the target's edges; 0 without any.
template <class T>
void reduce_edges(int64_t function, const TileRows& tile, const T* rows, int64_t width, T* out) {
  constexpr int L = kLanes<T>;
  using V = Vector<T, L>;
  for (int64_t target = 0; target < tile.num_targets; ++target, out += width) {
    const int64_t begin = tile.begin(target), end = tile.end(target);
    for (int64_t j = 0; j < width; j += L) {
      const int64_t count = width - j;
      int64_t edge = begin;
      V result{};
      if (tile.adds) {
        result = load_first<L>(out + j, count);
      } else if (function != kAdd && edge < end) {
        result = load<L>(rows + edge++ * width + j);
      }
      if (function == kAdd) {
        for (; edge < end; ++edge) result += load<L>(rows + edge * width + j);
      } else if (function == kMaximum) {
        for (; edge < end; ++edge) {
          const V value = load<L>(rows + edge * width + j);
          result = (value > result) | (value != value) ? value : result;
        }
      } else {
        for (; edge < end; ++edge) {
          const V value = load<L>(rows + edge * width + j);
          result = (value < result) | (value != value) ? value : result;
        }
      }
      store_first<L>(out + j, result, count);
    }
  }
}

// out[o, i] = sum (or the largest) over r of a[o, r, i], for all rows.
template <class T>
void reduce_columns(int64_t function, const T* a, int64_t outer, int64_t reduced, int64_t inner, T* out) {
  constexpr int L = kLanes<T>;
  using V = Vector<T, L>;
  for (int64_t o = 0; o < outer; ++o, a += reduced * inner, out += inner) {
    if (inner == 1) {
      V sums{};
      int64_t r = 0;
      if (function == kAdd) {
        for (; r < reduced; r += L) sums += load_first<L>(a + r, reduced - r);
        *out = sum_lanes<L, T>(sums);
      } else {
        T most = a[0];
        for (r = 1; r < reduced; ++r) most = a[r] > most || a[r] != a[r] ? a[r] : most;
        *out = most;
      }
      continue;
    }
    for (int64_t i = 0; i < inner; i += L) {
      V result = load_first<L>(a + i, inner - i);
      for (int64_t r = 1; r < reduced; ++r) {
        const V value = load_first<L>(a + r * inner + i, inner - i);
        result = function == kAdd ? result + value : ((value > result) | (value != value) ? value : result);
      }
      store_first<L>(out + i, result, inner - i);
    }
  }
}

// Copies a block of up to three dimensions from each row of one matrix into each row of another.
template <class T>
void copy_block(const int64_t* p, const T* from, T* to, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; ++row, from += p[0], to += p[1]) {
    for (int64_t i = 0; i < p[4]; ++i) {
      for (int64_t j = 0; j < p[5]; ++j) {
        const T* source = from + p[2] + i * p[7] + j * p[8];
        T* target = to + p[3] + (i * p[5] + j) * p[6];
        if (p[9] == 1) {
          copy_row(source, target, p[6]);
        } else {
          for (int64_t k = 0; k < p[6]; ++k) target[k] = source[k * p[9]];
        }
      }
    }
  }
}

// Executes a program on the rows of a tile with the memory of one thread.
template <class T>
struct Executor {
  const MessageRun<T>& run;
  T* const memory;
  T* const* staging;         // rows of the super-tile that are added to sources later
  int64_t first_staged;      // the super-tile's first edge
  T* totals;                 // totals of this group of tiles

  T* slot(int64_t number) const { return memory + run.slot_offset[number]; }

  void execute(const TileRows& tile, int64_t level) const {
    for (int64_t number = 0; number < run.num_operations; ++number) {
      const MessageOperation& op = run.operations[number];
      if (level >= 0 && (op.once ? op.level != level : op.level > level)) continue;
      const bool is_total = op.kind == kTotal || op.kind == kTotalProduct;
      if (is_total && !op.of_edges && !tile.last) continue;  // a target's row counts once
      step(op, tile, static_cast<T>(run.constants[number]));
    }
  }

  void step(const MessageOperation& op, const TileRows& tile, T constant) const {
    const int64_t width = op.width, num_rows = op.of_edges ? tile.num_edges : tile.num_targets;
    const int64_t count = num_rows * width, *p = op.p;
    switch (op.kind) {
      case kLoadSource: {
        const int64_t* sources = run.sources + tile.first_edge;
        const T* rows = run.tensors[op.a];
        T* out = slot(op.out);
        for (int64_t e = 0; e < tile.num_edges; ++e) {
          if (e + 8 < tile.num_edges) prefetch_row(rows + sources[e + 8] * width, width);
          copy_row(rows + sources[e] * width, out + e * width, width);
        }
        break;
      }
      case kLoadEdge: {
        const T* rows = run.tensors[op.a];
        T* out = slot(op.out);
        for (int64_t e = 0; e < tile.num_edges; ++e) copy_row(rows + run.edge(tile.first_edge + e) * width, out + e * width, width);
        break;
      }
      case kLoadTarget:
        copy_row(run.tensors[op.a] + tile.first_target * width, slot(op.out), count);
        break;
      case kStoreEdge: {
        const T* rows = slot(op.a);
        T* out = run.tensors[op.out];
        for (int64_t e = 0; e < tile.num_edges; ++e) copy_row(rows + e * width, out + run.edge(tile.first_edge + e) * width, width);
        break;
      }
      case kStoreTarget:
        copy_row(slot(op.a), run.tensors[op.out] + tile.first_target * width, count);
        break;
      case kStoreSource:
        copy_row(slot(op.a), staging[op.out] + (tile.first_edge - first_staged) * width, count);
        break;
      case kSpread: {
        const T* rows = slot(op.a);
        T* out = slot(op.out);
        for (int64_t target = 0; target < tile.num_targets; ++target) {
          for (int64_t e = tile.begin(target); e < tile.end(target); ++e) copy_row(rows + target * width, out + e * width, width);
        }
        break;
      }
      case kReduce:
        reduce_edges(op.function, tile, slot(op.a), width, slot(op.out));
        break;
      case kCombine:
        combine_rows<T>(op.function, p[0], slot(op.a), p[0] == kPerRow ? run.tensors[op.b] : slot(op.b), constant,
                        slot(op.out), count, p[1]);
        break;
      case kChoose: {
        constexpr int L = kLanes<T>;
        using V = Vector<T, L>;
        const T *condition = slot(op.a), *yes = slot(op.b), *no = slot(op.c);
        T* out = slot(op.out);
        const V zero{}, same = V{} + constant;
        for (int64_t i = 0; i < count; i += L) {
          const V first = p[0] ? same : load<L>(yes + i), second = p[1] ? same : load<L>(no + i);
          store<L>(out + i, load<L>(condition + i) != zero ? first : second);
        }
        break;
      }
      case kReduceColumns:
        reduce_columns(op.function, slot(op.a), num_rows * p[0], p[1], p[2], slot(op.out));
        break;
      case kCopy:
        copy_block(p, p[10] ? run.tensors[op.a] : slot(op.a), slot(op.out), num_rows);
        break;
      case kFill: {
        T* out = slot(op.out);
        for (int64_t i = 0; i < count; ++i) out[i] = constant;
        break;
      }
      case kMatmul:
        multiply(slot(op.a), p[0], int64_t{1}, run.tensors[op.b], num_rows, p[0], width, slot(op.out), false);
        break;
      case kMultiplyEach:
        for (int64_t row = 0; row < num_rows; ++row) {
          multiply(slot(op.a) + row * p[0] * p[1], p[1], int64_t{1}, slot(op.b) + row * p[1] * p[2], p[0], p[1], p[2],
                   slot(op.out) + row * width, false);
        }
        break;
      case kTotalProduct:
        multiply(slot(op.a), int64_t{1}, p[0], slot(op.b), p[0], num_rows, p[1], totals + op.out, true);
        break;
      case kTotal:
        for (int64_t row = 0; row < num_rows; ++row) add_row(slot(op.a) + row * width, totals + op.out, width);
        break;
      default:
        break;
    }
  }

  // Runs a target whose edges fill several tiles: for each level of reductions, all of its parts.
  void execute_parts(const MessageTile& tile) const {
    for (int64_t level = 0; level < run.num_levels; ++level) {
      const bool of_edges = run.levels[level];
      const int64_t end = of_edges ? tile.end_edge : tile.first_edge + 1;
      for (int64_t edge = tile.first_edge; edge < end; edge += run.capacity) {
        const int64_t left = tile.end_edge - edge;
        const int64_t num_edges = !of_edges ? 0 : left < run.capacity ? left : run.capacity;
        const bool last = edge + run.capacity >= end;
        execute({run.indptr, tile.first_target, 1, edge, num_edges, edge > tile.first_edge, last}, level);
      }
    }
  }

  void execute_tile(const MessageTile& tile) const {
    const int64_t num_edges = tile.end_edge - tile.first_edge;
    if (num_edges > run.capacity) return execute_parts(tile);
    execute({run.indptr, tile.first_target, tile.end_target - tile.first_target, tile.first_edge, num_edges, false, true}, -1);
  }
};

// Super-tiles run one after the other, the groups of their tiles in parallel. Then the totals of the groups are added in
// their order, and the gradients of sources in the order of the edges, so results do not depend on the number of threads.
template <class T>
void run_messages(const MessageRun<T>& run) {
  const int num_threads = run.num_threads;
  for (int64_t super = 0; super < run.num_supers; ++super) {
    const int64_t first = run.supers[super], end = run.supers[super + 1];
    const int64_t first_edge = run.tiles[first].first_edge, end_edge = run.tiles[end - 1].end_edge;
#pragma omp parallel num_threads(num_threads)
    {
      T* const memory = run.memory + omp_get_thread_num() * run.memory_per_thread;
#pragma omp for schedule(dynamic, 1)
      for (int64_t group = 0; group < run.num_groups; ++group) {
        T* totals = run.group_totals + group * run.num_totals;
        for (int64_t i = 0; i < run.num_totals; ++i) totals[i] = 0;
        const Executor<T> executor{run, memory, run.staging, first_edge, totals};
        const int64_t from = first + (end - first) * group / run.num_groups;
        const int64_t to = first + (end - first) * (group + 1) / run.num_groups;
        for (int64_t tile = from; tile < to; ++tile) executor.execute_tile(run.tiles[tile]);
      }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < run.num_totals; ++i) {
        T sum = run.totals[i];
        for (int64_t group = 0; group < run.num_groups; ++group) sum += run.group_totals[group * run.num_totals + i];
        run.totals[i] = sum;
      }
      const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
      for (int64_t rows = 0; rows < run.num_staged; ++rows) {
        const int64_t width = run.staged_width[rows];
        T* const out = run.tensors[run.staged_tensor[rows]];
        for (int64_t edge = first_edge; edge < end_edge; ++edge) {
          const int64_t source = run.sources[edge];
          if (source % count == thread) add_row(run.staging[rows] + (edge - first_edge) * width, out + source * width, width);
        }
      }
    }
  }
}

}  // namespace weft::WEFT_ISA
