#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings.h"
#include "relabel.h"
#include "sampling.h"

namespace weft {
namespace {

using namespace nb::literals;

template <class T>
using Maybe = std::optional<ConstArray<T, 1>>;

template <class T>
const T* data_or_null(const Maybe<T>& array) {
  return array ? array->data() : nullptr;
}

static_assert(sizeof(SampledRow) == 3 * sizeof(int64_t));

// The arguments of a sample, checked, for both passes.
template <class Index>
class Sampler {
 public:
  Sampler(ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, Maybe<float> weight32, Maybe<double> weight64,
          Maybe<int16_t> type16, Maybe<int32_t> type32, Maybe<int64_t> ids, ConstArray<int64_t, 1> fanouts, int method,
          uint64_t key, uint64_t next_key, double turn)
      : num_vertices_(static_cast<int64_t>(indptr.shape(0)) - 1) {
    const size_t num_edges = indices.shape(0);
    require(num_vertices_ >= 0 && (!ids || static_cast<int64_t>(ids->shape(0)) == num_vertices_),
            "indptr must not be empty, and ids have a number for each vertex");
    require((!weight32 || weight32->shape(0) == num_edges) && (!weight64 || weight64->shape(0) == num_edges) &&
                (!type16 || type16->shape(0) == num_edges) && (!type32 || type32->shape(0) == num_edges),
            "weights and relations must have a number for each edge");
    require(method >= 0 && method <= 2 && (method != 2 || weight32 || weight64),
            "method must be 0, 1 or 2, which needs weights");
    require(fanouts.shape(0) >= 1 && (type16 || type32 || fanouts.shape(0) == 1),
            "fanouts must have a number for each relation");
    sampling_ = {indptr.data(),          indices.data(),         data_or_null(weight32), data_or_null(weight64),
                 data_or_null(type16),   data_or_null(type32),   data_or_null(ids),      fanouts.data(),
                 static_cast<int64_t>(fanouts.shape(0)), static_cast<Method>(method), key, next_key, turn};
  }

  const Sampling<Index>& sampling() const { return sampling_; }
  int64_t num_vertices() const { return num_vertices_; }

 private:
  Sampling<Index> sampling_;
  int64_t num_vertices_;
};

template <class Index>
void bind_sample(nb::module_& module) {
  module.def(
      "count_sample",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, Maybe<float> weight32, Maybe<double> weight64,
         Maybe<int16_t> type16, Maybe<int32_t> type32, Maybe<int64_t> ids, ConstArray<int64_t, 1> fanouts, int method,
         uint64_t key, uint64_t next_key, double turn, ConstArray<int64_t, 1> targets, Array<int64_t, 2> rows,
         Array<int64_t, 1> block, std::optional<Array<double, 1>> row_scale, int num_threads) {
        const Sampler<Index> sampler(indptr, indices, weight32, weight64, type16, type32, ids, fanouts, method, key,
                                     next_key, turn);
        const size_t count = targets.shape(0);
        require(rows.shape(0) == count && rows.shape(1) == 3 && block.shape(0) == count + 1 &&
                    (!row_scale || row_scale->shape(0) == count) && num_threads >= 1,
                "rows and row_scale must be as many as targets, block one longer, num_threads not below 1");
        nb::gil_scoped_release release;
        count_sample(sampler.sampling(), targets.data(), static_cast<int64_t>(count), sampler.num_vertices(),
                     reinterpret_cast<SampledRow*>(rows.data()), block.data(), row_scale ? row_scale->data() : nullptr,
                     num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "weight32"_a.noconvert().none(), "weight64"_a.noconvert().none(),
      "type16"_a.noconvert().none(), "type32"_a.noconvert().none(), "ids"_a.noconvert().none(), "fanouts"_a.noconvert(),
      "method"_a, "key"_a, "next_key"_a, "turn"_a, "targets"_a.noconvert(), "rows"_a.noconvert(), "block"_a.noconvert(),
      "row_scale"_a.noconvert().none(), "num_threads"_a);
}

template <class Index, class Id>
void bind_fill(nb::module_& module) {
  module.def(
      "fill_sample",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, Maybe<float> weight32, Maybe<double> weight64,
         Maybe<int16_t> type16, Maybe<int32_t> type32, Maybe<int64_t> ids, ConstArray<int64_t, 1> fanouts, int method,
         uint64_t key, uint64_t next_key, double turn, ConstArray<int64_t, 2> rows, ConstArray<int64_t, 1> block,
         Array<Id, 1> edge_ids, Array<Index, 1> sources, std::optional<Array<double, 1>> scale, int num_threads) {
        const Sampler<Index> sampler(indptr, indices, weight32, weight64, type16, type32, ids, fanouts, method, key,
                                     next_key, turn);
        const size_t count = edge_ids.shape(0);
        require(rows.shape(1) == 3 && block.shape(0) == rows.shape(0) + 1 &&
                    block.data()[rows.shape(0)] == static_cast<int64_t>(count) && sources.shape(0) == count &&
                    (!scale || scale->shape(0) == count) && num_threads >= 1,
                "edge_ids, sources and scale must be as long as block says, num_threads not below 1");
        nb::gil_scoped_release release;
        fill_sample(sampler.sampling(), reinterpret_cast<const SampledRow*>(rows.data()),
                    static_cast<int64_t>(rows.shape(0)), block.data(), edge_ids.data(), sources.data(),
                    scale ? scale->data() : nullptr, num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "weight32"_a.noconvert().none(), "weight64"_a.noconvert().none(),
      "type16"_a.noconvert().none(), "type32"_a.noconvert().none(), "ids"_a.noconvert().none(), "fanouts"_a.noconvert(),
      "method"_a, "key"_a, "next_key"_a, "turn"_a, "rows"_a.noconvert(), "block"_a.noconvert(), "edge_ids"_a.noconvert(),
      "sources"_a.noconvert(), "scale"_a.noconvert().none(), "num_threads"_a);
}

IdMap map_of(Array<int64_t, 2>& words, Array<uint8_t, 1>& pages, int64_t num_ids) {
  require(static_cast<int64_t>(words.shape(0)) == (num_ids + kWordIds - 1) / kWordIds && words.shape(1) == 2 &&
              static_cast<int64_t>(pages.shape(0)) == (num_ids + kPageIds - 1) / kPageIds,
          "words and pages must hold all ids");
  return {reinterpret_cast<IdWord*>(words.data()), pages.data(), num_ids};
}

template <class Index>
void bind_relabel(nb::module_& module) {
  module.def(
      "mark_ids",
      [](Array<int64_t, 2> words, Array<uint8_t, 1> pages, int64_t num_ids, ConstArray<int64_t, 1> first,
         ConstArray<Index, 1> others, int num_threads) {
        const IdMap map = map_of(words, pages, num_ids);
        require(num_threads >= 1, "num_threads must not be below 1");
        nb::gil_scoped_release release;
        return mark_ids(map, first.data(), static_cast<int64_t>(first.shape(0)), others.data(),
                        static_cast<int64_t>(others.shape(0)), num_threads);
      },
      "words"_a.noconvert(), "pages"_a.noconvert(), "num_ids"_a, "first"_a.noconvert(), "others"_a.noconvert(),
      "num_threads"_a);
  module.def(
      "place_ids",
      [](Array<int64_t, 2> words, Array<uint8_t, 1> pages, int64_t num_ids, ConstArray<int64_t, 1> first,
         ConstArray<Index, 1> others, Array<int32_t, 1> local, Array<int32_t, 1> positions, Array<int64_t, 1> fresh,
         int num_threads) {
        const IdMap map = map_of(words, pages, num_ids);
        require(positions.shape(0) == others.shape(0) && first.shape(0) + fresh.shape(0) >= local.shape(0) &&
                    num_threads >= 1,
                "positions must be as many as others, fresh hold what first lacks, num_threads not be below 1");
        nb::gil_scoped_release release;
        place_ids(map, first.data(), static_cast<int64_t>(first.shape(0)), others.data(),
                  static_cast<int64_t>(others.shape(0)), static_cast<int64_t>(local.shape(0)), local.data(),
                  positions.data(), fresh.data(), num_threads);
      },
      "words"_a.noconvert(), "pages"_a.noconvert(), "num_ids"_a, "first"_a.noconvert(), "others"_a.noconvert(),
      "local"_a.noconvert(), "positions"_a.noconvert(), "fresh"_a.noconvert(), "num_threads"_a);
}

}  // namespace

void bind_sampling(nb::module_& module) {
  bind_sample<int32_t>(module);
  bind_sample<int64_t>(module);
  bind_fill<int32_t, int32_t>(module);
  bind_fill<int32_t, int64_t>(module);
  bind_fill<int64_t, int32_t>(module);
  bind_fill<int64_t, int64_t>(module);
  bind_relabel<int32_t>(module);
  bind_relabel<int64_t>(module);
}

}  // namespace weft
