#include <nanobind/stl/optional.h>

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "isa.h"

namespace nanobind::detail {

template <>
struct dtype_traits<weft::BFloat16> {
  static constexpr dlpack::dtype value{static_cast<uint8_t>(dlpack::dtype_code::Bfloat), 16, 1};
  static constexpr auto name = const_name("bfloat16");
};

}  // namespace nanobind::detail

namespace weft {
namespace {

using namespace nb::literals;

template <class T, size_t Dims>
using MaybeConst = std::optional<ConstArray<T, Dims>>;

template <class T, size_t Dims>
using Maybe = std::optional<Array<T, Dims>>;

template <class A>
auto data_or_null(const std::optional<A>& array) -> decltype(array->data()) {
  return array ? array->data() : nullptr;
}

// The length of an array, or `otherwise` if there is none.
template <class A>
int64_t length_or(const std::optional<A>& array, int64_t otherwise) {
  return array ? static_cast<int64_t>(array->shape(0)) : otherwise;
}

template <class A>
int64_t size(const A& array, size_t dim) {
  return static_cast<int64_t>(array.shape(dim));
}

template <class A>
bool is(const A& array, int64_t rows, int64_t cols) {
  return size(array, 0) == rows && size(array, 1) == cols;
}

using AnyIds = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

EdgeIds edge_ids_of(const AnyIds& ids) {
  if (ids.dtype() == nb::dtype<int32_t>()) return {static_cast<const int32_t*>(ids.data()), nullptr};
  require(ids.dtype() == nb::dtype<int64_t>(), "edge_ids must be int32 or int64");
  return {nullptr, static_cast<const int64_t*>(ids.data())};
}

// The Python class EdgeDropout: it owns the arrays to which a weft::EdgeDropout points.
struct Mask {
  ConstArray<int64_t, 1> source_ids, target_ids;
  uint64_t key;
  uint32_t first_head, threshold;
  double scale;

  EdgeDropout of(int64_t num_sources, int64_t num_targets) const {
    require(size(source_ids, 0) == num_sources && size(target_ids, 0) == num_targets,
            "dropout must have an id per source and per target");
    return {source_ids.data(), target_ids.data(), key, first_head, threshold, scale};
  }
};

void bind_mask(nb::module_& module) {
  using Ids = ConstArray<int64_t, 1>;
  nb::class_<Mask>(module, "EdgeDropout")
      .def(
          "__init__",
          [](Mask* self, Ids sources, Ids targets, uint64_t key, uint32_t first_head, uint32_t threshold, double scale) {
            new (self) Mask{sources, targets, key, first_head, threshold, scale};
          },
          "source_ids"_a.noconvert(), "target_ids"_a.noconvert(), "key"_a, "first_head"_a, "threshold"_a, "scale"_a);
}

template <class Table>
const Table& table() {
  return kernels();
}

// Checks the row pointers before a kernel reads a matrix. Indices are not checked, since that would read all edges.
template <class I>
void check_rows(const ConstArray<int64_t, 1>& indptr, const ConstArray<I, 1>& indices, int num_threads) {
  require(size(indptr, 0) >= 1 && indptr.data()[0] == 0, "indptr must start with 0");
  require(indptr.data()[size(indptr, 0) - 1] == size(indices, 0), "indptr must end at the number of entries");
  require(num_threads >= 1, "num_threads must be at least 1");
}

template <class R, class Y, class I>
void bind_spmm(nb::module_& module) {
  using T = Sum<R>;
  module.def(
      "spmm",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, MaybeConst<T, 1> weight,
         MaybeConst<T, 1> neighbour_scale, MaybeConst<T, 1> row_scale, MaybeConst<T, 1> loop_scale, ConstRows<R> x,
         int64_t readable, Array<Y, 2> y, bool add, int num_threads) {
        check_rows(indptr, indices, num_threads);
        const int64_t num_rows = size(indptr, 0) - 1, width = size(x, 1), num_loops = length_or(loop_scale, 0);
        require(is(y, num_rows, width), "y must have a row per row of the matrix and the columns of x");
        const bool apart = size(x, 0) < 2 || x.stride(0) >= readable, whole = width < 2 || x.stride(1) == 1;
        require(size(x, 0) == 0 || (apart && whole), "rows of x must be whole");
        require(width <= readable, "readable must not be less than the columns of x");
        require(length_or(weight, size(indices, 0)) == size(indices, 0), "weight must have one number per entry");
        require(length_or(neighbour_scale, size(x, 0)) == size(x, 0),
                "neighbour_scale must have one number per row of x");
        require(length_or(row_scale, num_rows) == num_rows, "row_scale must have one number per row of the matrix");
        require(num_loops <= num_rows && num_loops <= size(x, 0), "loop_scale must not be longer than x or y");
        const Spmm<R, Y, I> args{num_rows,
                                 width,
                                 x.stride(0),
                                 readable,
                                 indptr.data(),
                                 indices.data(),
                                 data_or_null(weight),
                                 data_or_null(neighbour_scale),
                                 data_or_null(row_scale),
                                 data_or_null(loop_scale),
                                 num_loops,
                                 x.data(),
                                 y.data(),
                                 add,
                                 num_threads};
        nb::gil_scoped_release release;
        const auto& known = table<SumKernels<R, I>>();
        if constexpr (sizeof(R) == sizeof(Y)) {
          known.spmm(args);
        } else {
          known.spmm_wide(args);
        }
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "weight"_a.noconvert().none(),
      "neighbour_scale"_a.noconvert().none(), "row_scale"_a.noconvert().none(), "loop_scale"_a.noconvert().none(),
      "x"_a.noconvert(), "readable"_a, "y"_a.noconvert(), "add"_a, "num_threads"_a);
}

template <class T, class I>
void bind_max(nb::module_& module) {
  using Place = typename Position<T>::type;
  module.def(
      "spmm_max",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, ConstArray<T, 2> x, Array<T, 2> y,
         Array<Place, 2> position, int num_threads) {
        check_rows(indptr, indices, num_threads);
        const int64_t num_rows = size(indptr, 0) - 1, width = size(x, 1);
        require(is(y, num_rows, width) && is(position, num_rows, width),
                "y and position must have a row per row of the matrix and the columns of x");
        const SpmmMax<T, I> args{num_rows, width,    indptr.data(),   indices.data(),
                                 x.data(), y.data(), position.data(), num_threads};
        nb::gil_scoped_release release;
        table<GraphKernels<T, I>>().spmm_max(args);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "x"_a.noconvert(), "y"_a.noconvert(), "position"_a.noconvert(),
      "num_threads"_a);
  module.def(
      "spmm_max_backward",
      [](ConstArray<int64_t, 1> indptr, ConstArray<int64_t, 1> indptr_t, ConstArray<I, 1> indices_t, AnyIds edge_ids,
         ConstArray<Place, 2> position, ConstArray<T, 2> grad_y, Array<T, 2> grad_x, int num_threads) {
        check_rows(indptr_t, indices_t, num_threads);
        const int64_t num_targets = size(indptr, 0) - 1, num_sources = size(indptr_t, 0) - 1, width = size(grad_y, 1);
        require(is(position, num_targets, width) && is(grad_y, num_targets, width) && is(grad_x, num_sources, width) &&
                    size(edge_ids, 0) == size(indices_t, 0),
                "position, grad_y and grad_x must share their columns, edge_ids have one id per entry");
        const SpmmMaxBackward<T, I> args{
            num_sources,           width,           indptr.data(), indptr_t.data(), indices_t.data(),
            edge_ids_of(edge_ids), position.data(), grad_y.data(), grad_x.data(),   num_threads};
        nb::gil_scoped_release release;
        table<GraphKernels<T, I>>().spmm_max_backward(args);
      },
      "indptr"_a.noconvert(), "indptr_t"_a.noconvert(), "indices_t"_a.noconvert(), "edge_ids"_a.noconvert(),
      "position"_a.noconvert(), "grad_y"_a.noconvert(), "grad_x"_a.noconvert(), "num_threads"_a);
}

void check_bounds(const ConstArray<int64_t, 1>& bounds, int64_t num_heads, int64_t width) {
  require(size(bounds, 0) == num_heads + 1, "bounds must have one number more than there are heads");
  const int64_t* at = bounds.data();
  bool ascending = at[0] == 0 && at[num_heads] == width;
  for (int64_t head = 0; head < num_heads; ++head) ascending = ascending && at[head] <= at[head + 1];
  require(ascending, "bounds must ascend from 0 to the width of h");
}

template <class R, class I>
void bind_attend(nb::module_& module) {
  using T = Sum<R>;
  module.def(
      "attend",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, ConstArray<R, 2> logit_src,
         ConstArray<R, 2> logit_dst, MaybeConst<bool, 1> loop, ConstArray<int64_t, 1> bounds, T slope,
         ConstArray<R, 2> h, bool lse_known, Array<T, 2> lse, Array<R, 2> y, Maybe<R, 2> plus, Maybe<T, 2> share,
         const Mask* dropout, int num_threads) {
        check_rows(indptr, indices, num_threads);
        const int64_t num_targets = size(indptr, 0) - 1, num_heads = size(logit_src, 1), width = size(h, 1);
        check_bounds(bounds, num_heads, width);
        require(is(logit_dst, num_targets, num_heads) && is(lse, num_targets, num_heads) &&
                    size(logit_src, 0) == size(h, 0) && is(y, num_targets, width),
                "logits, lse, h and y must agree in targets, sources, heads and width");
        require(bool(plus) == bool(share) &&
                    (!plus || (is(*plus, num_targets, width) && is(*share, num_targets, num_heads))),
                "plus and share go together, with the shapes of y and lse");
        require(length_or(loop, num_targets) == num_targets && (!loop || num_targets <= size(h, 0)),
                "loop must have one flag per target, and targets be the first sources");
        const EdgeDropout drops = dropout ? dropout->of(size(h, 0), num_targets) : EdgeDropout{};
        const Attend<R, I> args{num_targets,
                                num_heads,
                                width,
                                indptr.data(),
                                indices.data(),
                                logit_src.data(),
                                logit_dst.data(),
                                data_or_null(loop),
                                bounds.data(),
                                slope,
                                h.data(),
                                lse_known,
                                lse.data(),
                                y.data(),
                                data_or_null(plus),
                                data_or_null(share),
                                dropout ? &drops : nullptr,
                                num_threads};
        nb::gil_scoped_release release;
        table<SumKernels<R, I>>().attend(args);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "logit_src"_a.noconvert(), "logit_dst"_a.noconvert(),
      "loop"_a.noconvert().none(), "bounds"_a.noconvert(), "slope"_a, "h"_a.noconvert(), "lse_known"_a,
      "lse"_a.noconvert(), "y"_a.noconvert(), "plus"_a.noconvert().none(), "share"_a.noconvert().none(),
      "dropout"_a.none(), "num_threads"_a);
  module.def(
      "attend_backward",
      [](ConstArray<int64_t, 1> indptr_t, ConstArray<I, 1> indices_t, ConstArray<R, 2> logit_src,
         ConstArray<T, 3> stats, MaybeConst<bool, 1> loop, ConstArray<int64_t, 1> bounds, T slope, MaybeConst<R, 2> h,
         ConstArray<R, 2> grad_y, Maybe<R, 2> grad_h, Maybe<T, 2> grad_logit_src, bool add,
         const Mask* dropout, int num_threads) {
        check_rows(indptr_t, indices_t, num_threads);
        const int64_t num_sources = size(indptr_t, 0) - 1, num_targets = size(stats, 0);
        const int64_t num_heads = size(logit_src, 1), width = size(grad_y, 1);
        check_bounds(bounds, num_heads, width);
        require(size(stats, 1) == 3 && size(stats, 2) == num_heads && size(logit_src, 0) == num_sources &&
                    size(grad_y, 0) == num_targets && (!h || is(*h, num_sources, width)),
                "logit_src, stats, h and grad_y must agree in targets, sources, heads and width");
        require((!grad_h || is(*grad_h, num_sources, width)) &&
                    (!grad_logit_src || is(*grad_logit_src, num_sources, num_heads)) && bool(grad_logit_src) == bool(h),
                "gradients must have the shapes of what they are for, and h comes with that of logit_src");
        require(!add || grad_h, "there must be a grad_h to add to");
        require(length_or(loop, num_targets) == num_targets && (!loop || num_targets <= num_sources),
                "loop must have one flag per target, and targets be the first sources");
        const EdgeDropout drops = dropout ? dropout->of(num_sources, num_targets) : EdgeDropout{};
        const AttendBackward<R, I> args{num_sources,
                                        num_targets,
                                        num_heads,
                                        width,
                                        indptr_t.data(),
                                        indices_t.data(),
                                        logit_src.data(),
                                        stats.data(),
                                        data_or_null(loop),
                                        bounds.data(),
                                        slope,
                                        data_or_null(h),
                                        grad_y.data(),
                                        data_or_null(grad_h),
                                        data_or_null(grad_logit_src),
                                        add,
                                        dropout ? &drops : nullptr,
                                        num_threads};
        nb::gil_scoped_release release;
        table<SumKernels<R, I>>().attend_backward(args);
      },
      "indptr_t"_a.noconvert(), "indices_t"_a.noconvert(), "logit_src"_a.noconvert(), "stats"_a.noconvert(),
      "loop"_a.noconvert().none(), "bounds"_a.noconvert(), "slope"_a, "h"_a.noconvert().none(), "grad_y"_a.noconvert(),
      "grad_h"_a.noconvert().none(), "grad_logit_src"_a.noconvert().none(), "add"_a, "dropout"_a.none(),
      "num_threads"_a);
}

template <class T, class I>
Pairs<T, I> pairs_of(const ConstArray<int64_t, 1>& indptr, const ConstArray<I, 1>& indices,
                     const MaybeConst<bool, 1>& loop, const ConstArray<int64_t, 1>& bounds, T slope,
                     const ConstArray<T, 2>& left, const ConstArray<T, 2>& right, const ConstArray<T, 1>& attention,
                     const MaybeConst<T, 2>& features, const MaybeConst<T, 2>& loop_features,
                     const MaybeConst<T, 2>& edge_map, int num_threads) {
  check_rows(indptr, indices, num_threads);
  const int64_t num_targets = size(indptr, 0) - 1, num_heads = size(bounds, 0) - 1, width = size(left, 1);
  const int64_t num_features = length_or(edge_map, 0);
  check_bounds(bounds, num_heads, width);
  require(is(right, num_targets, width) && size(attention, 0) == width, "left, right and attention must share columns");
  require(length_or(loop, num_targets) == num_targets && (!loop || num_targets <= size(left, 0)),
          "loop must have one flag per target, and targets be the first sources");
  require(bool(edge_map) == bool(features) && bool(loop_features) == (features && loop),
          "edge_map comes with features, and with those of loops where there are any");
  require(!edge_map || (size(*edge_map, 1) == width && is(*features, size(indices, 0), num_features)),
          "edge_map must have a row per feature and a column per column of left, features a row per edge");
  require(!loop_features || is(*loop_features, num_targets, num_features), "loops must have the features of edges");
  return {num_targets,
          num_heads,
          width,
          num_features,
          indptr.data(),
          indices.data(),
          data_or_null(loop),
          bounds.data(),
          slope,
          left.data(),
          right.data(),
          attention.data(),
          data_or_null(features),
          data_or_null(loop_features),
          data_or_null(edge_map),
          num_threads};
}

// Number of rows of logits: the edges, then a loop for each target.
template <class I>
int64_t num_logits(const ConstArray<I, 1>& indices, const MaybeConst<bool, 1>& loop) {
  return size(indices, 0) + length_or(loop, 0);
}

template <class T, class I>
void bind_pairs(nb::module_& module) {
  module.def(
      "pair_logits",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, MaybeConst<bool, 1> loop,
         ConstArray<int64_t, 1> bounds, T slope, ConstArray<T, 2> left, ConstArray<T, 2> right,
         ConstArray<T, 1> attention, MaybeConst<T, 2> features, MaybeConst<T, 2> loop_features,
         MaybeConst<T, 2> edge_map, Array<T, 2> logits, int num_threads) {
        const auto args = pairs_of<T, I>(indptr, indices, loop, bounds, slope, left, right, attention, features,
                                         loop_features, edge_map, num_threads);
        require(is(logits, num_logits(indices, loop), args.num_heads), "logits must have a row per edge and per loop");
        nb::gil_scoped_release release;
        table<GraphKernels<T, I>>().pair_logits(args, logits.data());
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "loop"_a.noconvert().none(), "bounds"_a.noconvert(), "slope"_a,
      "left"_a.noconvert(), "right"_a.noconvert(), "attention"_a.noconvert(), "features"_a.noconvert().none(),
      "loop_features"_a.noconvert().none(), "edge_map"_a.noconvert().none(), "logits"_a.noconvert(), "num_threads"_a);
  module.def(
      "pair_backward",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, ConstArray<int64_t, 1> indptr_t,
         ConstArray<I, 1> indices_t, AnyIds edge_ids, MaybeConst<bool, 1> loop, ConstArray<int64_t, 1> bounds, T slope,
         ConstArray<T, 2> left, ConstArray<T, 2> right, ConstArray<T, 1> attention, MaybeConst<T, 2> features,
         MaybeConst<T, 2> loop_features, MaybeConst<T, 2> edge_map, ConstArray<T, 2> grad_logits, Array<T, 2> grad_left,
         Array<T, 2> grad_right, Array<T, 1> grad_attention, Maybe<T, 2> grad_edge_map, int num_threads) {
        const auto args = pairs_of<T, I>(indptr, indices, loop, bounds, slope, left, right, attention, features,
                                         loop_features, edge_map, num_threads);
        check_rows(indptr_t, indices_t, num_threads);
        const int64_t num_sources = size(indptr_t, 0) - 1;
        require(is(grad_logits, num_logits(indices, loop), args.num_heads),
                "grad_logits must have a row per edge and per loop");
        require(size(left, 0) == num_sources && size(edge_ids, 0) == size(indices_t, 0) &&
                    size(indices_t, 0) == size(indices, 0),
                "the transpose must have a row per source, and an id per edge");
        require(is(grad_left, num_sources, args.width) && is(grad_right, args.num_targets, args.width) &&
                    size(grad_attention, 0) == args.width && bool(grad_edge_map) == bool(edge_map) &&
                    (!edge_map || is(*grad_edge_map, args.num_features, args.width)),
                "gradients must have the shapes of what they are for");
        const PairsBackward<T, I> backward{args,
                                           num_sources,
                                           indptr_t.data(),
                                           indices_t.data(),
                                           edge_ids_of(edge_ids),
                                           grad_logits.data(),
                                           grad_left.data(),
                                           grad_right.data(),
                                           grad_attention.data(),
                                           data_or_null(grad_edge_map)};
        nb::gil_scoped_release release;
        table<GraphKernels<T, I>>().pair_backward(backward);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "indptr_t"_a.noconvert(), "indices_t"_a.noconvert(),
      "edge_ids"_a.noconvert(), "loop"_a.noconvert().none(), "bounds"_a.noconvert(), "slope"_a, "left"_a.noconvert(),
      "right"_a.noconvert(), "attention"_a.noconvert(), "features"_a.noconvert().none(),
      "loop_features"_a.noconvert().none(), "edge_map"_a.noconvert().none(), "grad_logits"_a.noconvert(),
      "grad_left"_a.noconvert(), "grad_right"_a.noconvert(), "grad_attention"_a.noconvert(),
      "grad_edge_map"_a.noconvert().none(), "num_threads"_a);
  module.def(
      "drop_edges",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, MaybeConst<bool, 1> loop, const Mask& dropout,
         Array<T, 2> alpha, int num_threads) {
        check_rows(indptr, indices, num_threads);
        const int64_t num_targets = size(indptr, 0) - 1, num_sources = size(dropout.source_ids, 0);
        require(length_or(loop, num_targets) == num_targets && (!loop || num_targets <= num_sources),
                "loop must have one flag per target, and targets be the first sources");
        require(size(alpha, 0) == num_logits(indices, loop), "alpha must have a row per edge and per loop");
        const DropEdges<T, I> args{num_targets,
                                   size(alpha, 1),
                                   indptr.data(),
                                   indices.data(),
                                   data_or_null(loop),
                                   dropout.of(num_sources, num_targets),
                                   alpha.data(),
                                   num_threads};
        nb::gil_scoped_release release;
        table<GraphKernels<T, I>>().drop_edges(args);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "loop"_a.noconvert().none(), "dropout"_a,
      "alpha"_a.noconvert(), "num_threads"_a);
  module.def(
      "weigh",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, std::optional<AnyIds> edge_ids,
         MaybeConst<bool, 1> loop, ConstArray<int64_t, 1> bounds, ConstArray<T, 2> alpha, ConstArray<T, 2> x,
         T scale, Array<T, 2> y, int num_threads) {
        check_rows(indptr, indices, num_threads);
        const int64_t num_rows = size(indptr, 0) - 1, num_heads = size(bounds, 0) - 1, width = size(x, 1);
        check_bounds(bounds, num_heads, width);
        require(is(alpha, num_logits(indices, loop), num_heads) && is(y, num_rows, width),
                "alpha must have a row per edge and per loop, y a row per row of the matrix and the columns of x");
        require(length_or(edge_ids, size(indices, 0)) == size(indices, 0), "edge_ids must have one id per entry");
        require(length_or(loop, 0) <= num_rows && length_or(loop, 0) <= size(x, 0), "loop must not be longer than x or y");
        const Weigh<T, I> args{num_rows,
                               num_heads,
                               width,
                               indptr.data(),
                               indices.data(),
                               bool(edge_ids),
                               edge_ids ? edge_ids_of(*edge_ids) : EdgeIds{nullptr, nullptr},
                               data_or_null(loop),
                               length_or(loop, 0),
                               bounds.data(),
                               alpha.data(),
                               x.data(),
                               scale,
                               y.data(),
                               num_threads};
        nb::gil_scoped_release release;
        table<GraphKernels<T, I>>().weigh(args);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "edge_ids"_a.noconvert().none(), "loop"_a.noconvert().none(),
      "bounds"_a.noconvert(), "alpha"_a.noconvert(), "x"_a.noconvert(), "scale"_a, "y"_a.noconvert(), "num_threads"_a);
  module.def(
      "weigh_backward",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, MaybeConst<bool, 1> loop,
         ConstArray<int64_t, 1> bounds, ConstArray<T, 2> alpha, ConstArray<T, 2> x, ConstArray<T, 2> grad_y, T scale,
         bool last, Array<T, 2> grad_logits, int num_threads) {
        check_rows(indptr, indices, num_threads);
        const int64_t num_targets = size(indptr, 0) - 1, num_heads = size(bounds, 0) - 1, width = size(x, 1);
        check_bounds(bounds, num_heads, width);
        require(is(alpha, num_logits(indices, loop), num_heads) && is(grad_logits, size(alpha, 0), num_heads) &&
                    is(grad_y, num_targets, width),
                "alpha and grad_logits must have a row per edge and per loop, grad_y the columns of x");
        require(length_or(loop, num_targets) == num_targets && (!loop || num_targets <= size(x, 0)),
                "loop must have one flag per target, and targets be the first sources");
        const WeighBackward<T, I> args{num_targets,   num_heads,     width,
                                       indptr.data(), indices.data(), data_or_null(loop),
                                       bounds.data(), alpha.data(),  x.data(),
                                       grad_y.data(), scale,         last,
                                       grad_logits.data(), num_threads};
        nb::gil_scoped_release release;
        table<GraphKernels<T, I>>().weigh_backward(args);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "loop"_a.noconvert().none(), "bounds"_a.noconvert(),
      "alpha"_a.noconvert(), "x"_a.noconvert(), "grad_y"_a.noconvert(), "scale"_a, "last"_a, "grad_logits"_a.noconvert(),
      "num_threads"_a);
}

template <class T>
void bind_softmax(nb::module_& module) {
  module.def(
      "edge_softmax",
      [](ConstArray<int64_t, 1> indptr, MaybeConst<bool, 1> loop, ConstArray<T, 2> logits, Array<T, 2> alpha,
         int num_threads) {
        require(size(indptr, 0) >= 1 && indptr.data()[0] == 0, "indptr must start with 0");
        const int64_t num_targets = size(indptr, 0) - 1, num_heads = size(logits, 1);
        require(length_or(loop, num_targets) == num_targets, "loop must have one flag per target");
        require(size(logits, 0) == indptr.data()[num_targets] + length_or(loop, 0) &&
                    is(alpha, size(logits, 0), num_heads),
                "logits and alpha must have a row per edge and per loop");
        const EdgeSoftmax<T> args{num_targets,   num_heads,    indptr.data(), data_or_null(loop),
                                  logits.data(), alpha.data(), num_threads};
        nb::gil_scoped_release release;
        table<GraphKernels<T, int32_t>>().edge_softmax(args);
      },
      "indptr"_a.noconvert(), "loop"_a.noconvert().none(), "logits"_a.noconvert(), "alpha"_a.noconvert(),
      "num_threads"_a);
}

template <class R>
void bind_rows(nb::module_& module) {
  using T = Sum<R>;
  module.def(
      "attend_stats",
      [](ConstArray<R, 2> logit_dst, ConstArray<T, 2> lse, ConstArray<int64_t, 1> bounds, T slope, Array<T, 3> stats,
         MaybeConst<R, 2> grad_y, MaybeConst<R, 2> y, MaybeConst<R, 2> plus, MaybeConst<T, 2> share,
         Maybe<T, 2> grad_logit_dst, int num_threads) {
        const int64_t num_targets = size(logit_dst, 0), num_heads = size(logit_dst, 1), width = y ? size(*y, 1) : 0;
        require(is(lse, num_targets, num_heads) && is(stats, num_targets, 3) && size(stats, 2) == num_heads,
                "lse and stats must have the rows and heads of logit_dst");
        require(bool(grad_y) == bool(y) && bool(y) == bool(plus) && bool(y) == bool(share) &&
                    bool(y) == bool(grad_logit_dst),
                "grad_y, y, plus, share and grad_logit_dst go together");
        if (y) {
          check_bounds(bounds, num_heads, width);
          require(is(*y, num_targets, width) && is(*grad_y, num_targets, width) && is(*plus, num_targets, width),
                  "grad_y, y and plus must have the same shape");
          require(is(*share, num_targets, num_heads) && is(*grad_logit_dst, num_targets, num_heads),
                  "share and grad_logit_dst must have the shape of logit_dst");
        }
        const AttendStats<R> args{num_targets,
                                  num_heads,
                                  width,
                                  logit_dst.data(),
                                  lse.data(),
                                  bounds.data(),
                                  slope,
                                  stats.data(),
                                  data_or_null(grad_y),
                                  data_or_null(y),
                                  data_or_null(plus),
                                  data_or_null(share),
                                  data_or_null(grad_logit_dst),
                                  num_threads};
        nb::gil_scoped_release release;
        table<RowKernels<R>>().attend_stats(args);
      },
      "logit_dst"_a.noconvert(), "lse"_a.noconvert(), "bounds"_a.noconvert(), "slope"_a, "stats"_a.noconvert(),
      "grad_y"_a.noconvert().none(), "y"_a.noconvert().none(), "plus"_a.noconvert().none(),
      "share"_a.noconvert().none(), "grad_logit_dst"_a.noconvert().none(), "num_threads"_a);
  module.def(
      "dropout",
      [](ConstArray<R, 2> x, ConstArray<int64_t, 1> rows, uint64_t key, uint32_t first_column, uint32_t threshold,
         T scale, bool relu, Array<R, 2> y, int num_threads) {
        require(size(rows, 0) == size(x, 0) && is(y, size(x, 0), size(x, 1)),
                "rows must have one id per row of x, y the shape of x");
        const Dropout<R> args{size(x, 0),   size(x, 1), x.data(), rows.data(), key,
                              first_column, threshold,  scale,    relu,        y.data(), num_threads};
        nb::gil_scoped_release release;
        table<RowKernels<R>>().dropout(args);
      },
      "x"_a.noconvert(), "rows"_a.noconvert(), "key"_a, "first_column"_a, "threshold"_a, "scale"_a, "relu"_a,
      "y"_a.noconvert(), "num_threads"_a);
  module.def(
      "relu_dropout_backward",
      [](ConstArray<R, 2> y, ConstArray<R, 2> grad_y, T scale, Array<R, 2> grad_x, int num_threads) {
        require(is(grad_y, size(y, 0), size(y, 1)) && is(grad_x, size(y, 0), size(y, 1)),
                "y, grad_y and grad_x must have the same shape");
        const ReluDropoutBackward<R> args{size(y, 0) * size(y, 1), y.data(), grad_y.data(), scale, grad_x.data(),
                                          num_threads};
        nb::gil_scoped_release release;
        table<RowKernels<R>>().relu_dropout_backward(args);
      },
      "y"_a.noconvert(), "grad_y"_a.noconvert(), "scale"_a, "grad_x"_a.noconvert(), "num_threads"_a);
}

// Bounds of the ranges of targets of each thread, with about the same number of entries in each, found in a sample of these.
// Even ranges would not do: the targets of some rows can be close together, as in a graph with communities.
template <class I>
std::vector<int64_t> target_bounds(const I* indices, int64_t num_entries, int64_t num_targets, int num_threads) {
  constexpr int64_t kSamples = 4096;
  std::vector<int64_t> sample, bounds(num_threads + 1, num_targets);
  for (int64_t entry = 0; entry < num_entries; entry += num_entries / kSamples + 1) sample.push_back(indices[entry]);
  std::sort(sample.begin(), sample.end());
  bounds[0] = 0;
  for (int part = 1; part < num_threads && !sample.empty(); ++part) {
    bounds[part] = sample[sample.size() * part / num_threads];
  }
  return bounds;
}

template <class R, class I>
void bind_scatter(nb::module_& module) {
  using T = Sum<R>;
  module.def(
      "spmm_scatter",
      [](ConstArray<int64_t, 1> indptr, ConstArray<I, 1> indices, MaybeConst<T, 1> weight, MaybeConst<T, 1> row_scale,
         MaybeConst<T, 1> target_scale, ConstRows<R> x, Array<T, 2> y, int num_threads) {
        check_rows(indptr, indices, num_threads);
        const int64_t num_rows = size(indptr, 0) - 1, width = size(x, 1);
        require(size(x, 0) == num_rows && size(y, 1) == width, "x must have a row per row, y the columns of x");
        require(width < 2 || x.stride(1) == 1, "rows of x must be whole");
        require(length_or(weight, size(indices, 0)) == size(indices, 0), "weight must have one number per entry");
        require(length_or(row_scale, num_rows) == num_rows, "row_scale must have one number per row of x");
        require(length_or(target_scale, size(y, 0)) == size(y, 0), "target_scale must have one number per row of y");
        const int threads = static_cast<int>(std::min<int64_t>(num_threads, size(indices, 0) * width / 8192 + 1));
        const auto bounds = target_bounds(indices.data(), size(indices, 0), size(y, 0), threads);
        const Scatter<R, I> args{num_rows,
                                 width,
                                 x.stride(0),
                                 bounds.data(),
                                 indptr.data(),
                                 indices.data(),
                                 data_or_null(weight),
                                 data_or_null(row_scale),
                                 data_or_null(target_scale),
                                 x.data(),
                                 y.data(),
                                 threads};
        nb::gil_scoped_release release;
        table<SumKernels<R, I>>().scatter(args);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "weight"_a.noconvert().none(), "row_scale"_a.noconvert().none(),
      "target_scale"_a.noconvert().none(), "x"_a.noconvert(), "y"_a.noconvert(), "num_threads"_a);
}

template <class R, class I>
void bind_sums(nb::module_& module) {
  bind_scatter<R, I>(module);
  bind_spmm<R, R, I>(module);
  if constexpr (sizeof(R) < sizeof(Sum<R>)) bind_spmm<R, Sum<R>, I>(module);
  bind_attend<R, I>(module);
}

template <class T, class I>
void bind_graph_kernels(nb::module_& module) {
  bind_sums<T, I>(module);
  bind_max<T, I>(module);
  bind_pairs<T, I>(module);
}

}  // namespace

void bind_kernels(nb::module_& module) {
  bind_mask(module);
  bind_graph_kernels<float, int32_t>(module);
  bind_graph_kernels<float, int64_t>(module);
  bind_graph_kernels<double, int32_t>(module);
  bind_graph_kernels<double, int64_t>(module);
  bind_sums<BFloat16, int32_t>(module);
  bind_sums<BFloat16, int64_t>(module);
  bind_softmax<float>(module);
  bind_softmax<double>(module);
  bind_rows<float>(module);
  bind_rows<double>(module);
  bind_rows<BFloat16>(module);
}

}  // namespace weft
