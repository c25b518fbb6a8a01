#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bindings.h"
#include "cover.h"
#include "dependencies.h"
#include "partition.h"
#include "working_set.h"

namespace weft {
namespace {

using namespace nb::literals;

void require_table(const Array<int64_t, 2>& counts) {
  require(counts.shape(0) == kNumCounts && counts.shape(1) >= 1, "counts must be [3, num_parts]");
}

void require_parts(const int32_t* part, size_t num_vertices, size_t num_parts) {
  const auto in_range = [=](int32_t p) { return p >= 0 && static_cast<size_t>(p) < num_parts; };
  require(std::all_of(part, part + num_vertices, in_range), "part must lie within [0, num_parts)");
}

void require_vertices(const int64_t* ids, size_t count, size_t num_vertices) {
  const auto in_range = [=](int64_t id) { return id >= 0 && static_cast<size_t>(id) < num_vertices; };
  require(std::all_of(ids, ids + count, in_range), "vertices must lie within [0, num_vertices)");
}

template <class Index>
void bind_dependencies(nb::module_& module) {
  module.def(
      "cache_levels",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, ConstArray<int32_t, 1> part, int32_t own,
         ConstArray<int64_t, 1> wanted, ConstArray<double, 2> costs, int64_t first, double ratio, double max_bytes,
         Array<int8_t, 1> levels, int num_threads) {
        const size_t num_vertices = part.shape(0);
        require(indptr.shape(0) == num_vertices + 1 && levels.shape(0) == num_vertices && num_threads >= 1,
                "part and levels must have the same length, indptr be one longer, num_threads not be below 1");
        require(costs.shape(1) == kNumLevelCosts && costs.shape(0) <= 100 && first >= 0, "costs must be [levels, 5]");
        require(ratio <= 1, "ratio must not exceed 1");
        require_vertices(wanted.data(), wanted.shape(0), num_vertices);
        const Caching caching{costs.data(), static_cast<int64_t>(costs.shape(0)), first, ratio, max_bytes};
        nb::gil_scoped_release release;
        const Cached cached = cache_levels(indptr.data(), indices.data(), static_cast<int64_t>(num_vertices),
                                           part.data(), own, wanted.data(), static_cast<int64_t>(wanted.shape(0)),
                                           caching, levels.data(), num_threads);
        return std::make_pair(cached.bytes, cached.limited);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "part"_a.noconvert(), "own"_a, "wanted"_a.noconvert(),
      "costs"_a.noconvert(), "first"_a, "ratio"_a, "max_bytes"_a, "levels"_a.noconvert(), "num_threads"_a);
  module.def(
      "gather_block",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, ConstArray<int32_t, 1> part,
         ConstArray<int64_t, 1> inputs, int64_t num_targets, std::optional<Array<Index, 1>> positions,
         Array<int64_t, 1> fetched) {
        const size_t num_vertices = part.shape(0), num_inputs = inputs.shape(0);
        require(indptr.shape(0) == num_vertices + 1 && fetched.shape(0) == num_vertices,
                "part and fetched must have the same length, indptr be one longer");
        require(num_targets >= 0 && static_cast<size_t>(num_targets) <= num_inputs, "targets must be among the inputs");
        require_vertices(inputs.data(), num_inputs, num_vertices);
        nb::gil_scoped_release release;
        return gather_block(indptr.data(), indices.data(), static_cast<int64_t>(num_vertices), part.data(),
                            inputs.data(), static_cast<int64_t>(num_inputs), num_targets,
                            positions ? positions->data() : nullptr, fetched.data());
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "part"_a.noconvert(), "inputs"_a.noconvert(), "num_targets"_a,
      "positions"_a.none(), "fetched"_a.noconvert());
}

template <class Index>
void bind_cover(nb::module_& module) {
  module.def(
      "least_cover",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, int64_t first, ConstArray<int64_t, 1> bounds,
         Array<uint8_t, 1> taken, int num_threads) {
        const size_t num_targets = indptr.shape(0) - 1, num_parts = bounds.shape(0) - 1;
        require(indptr.shape(0) >= 1 && bounds.shape(0) >= 1 && first >= 0 && num_threads >= 1,
                "indptr and bounds must not be empty, first not be below 0, num_threads not below 1");
        require(bounds(0) == 0 && std::is_sorted(bounds.data(), bounds.data() + num_parts + 1) &&
                    static_cast<size_t>(bounds(num_parts)) == taken.shape(0),
                "bounds must ascend from 0 to the length of taken");
        require(indptr(0) == 0 && std::is_sorted(indptr.data(), indptr.data() + num_targets + 1) &&
                    static_cast<size_t>(indptr(num_targets)) == indices.shape(0),
                "indptr must ascend from 0 to the number of indices");
        const int64_t num_sources = first + bounds(num_parts);
        const auto in_range = [=](Index u) { return u >= 0 && u < num_sources; };
        require(std::all_of(indices.data(), indices.data() + indices.shape(0), in_range),
                "indices must lie below first and the last of bounds together");
        nb::gil_scoped_release release;
        least_cover(indptr.data(), indices.data(), static_cast<int64_t>(num_targets), first, bounds.data(),
                    static_cast<int64_t>(num_parts), taken.data(), num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "first"_a, "bounds"_a.noconvert(), "taken"_a.noconvert(),
      "num_threads"_a);
}

template <class Index>
void bind_methods(nb::module_& module) {
  module.def(
      "count_parts",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, ConstArray<int32_t, 1> part,
         Array<int64_t, 2> counts, int num_threads) {
        const size_t num_vertices = part.shape(0);
        require(indptr.shape(0) == num_vertices + 1 && num_threads >= 1,
                "indptr must be one longer than part, num_threads not below 1");
        require_table(counts);
        require_parts(part.data(), num_vertices, counts.shape(1));
        nb::gil_scoped_release release;
        return count_parts(indptr.data(), indices.data(), static_cast<int64_t>(num_vertices), part.data(),
                           static_cast<int64_t>(counts.shape(1)), counts.data(), num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "part"_a.noconvert(), "counts"_a.noconvert(), "num_threads"_a);
  module.def(
      "fennel",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, ConstArray<int64_t, 1> indptr_t,
         ConstArray<Index, 1> indices_t, ConstArray<int64_t, 1> order, int64_t num_parts, int64_t most,
         Array<int32_t, 1> part) {
        const size_t num_vertices = part.shape(0);
        require(indptr.shape(0) == num_vertices + 1 && indptr_t.shape(0) == num_vertices + 1 &&
                    order.shape(0) == num_vertices,
                "order and part must have the same length, indptr and indptr_t be one longer");
        require(num_parts >= 1 && most >= 0 && most * num_parts >= static_cast<int64_t>(num_vertices),
                "most * num_parts must not be below the number of vertices");
        nb::gil_scoped_release release;
        fennel(indptr.data(), indices.data(), indptr_t.data(), indices_t.data(), static_cast<int64_t>(num_vertices),
               order.data(), num_parts, most, part.data());
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "indptr_t"_a.noconvert(), "indices_t"_a.noconvert(),
      "order"_a.noconvert(), "num_parts"_a, "most"_a, "part"_a.noconvert());
  module.def(
      "refine",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, ConstArray<int64_t, 1> order, double vertex_slack,
         double edge_slack, double remote_slack, int64_t max_passes, Array<int32_t, 1> part, Array<int64_t, 2> counts) {
        const size_t num_vertices = part.shape(0);
        require(indptr.shape(0) == num_vertices + 1 && order.shape(0) == num_vertices,
                "order and part must have the same length, indptr be one longer");
        require_table(counts);
        require_parts(part.data(), num_vertices, counts.shape(1));
        nb::gil_scoped_release release;
        return refine(indptr.data(), indices.data(), static_cast<int64_t>(num_vertices), order.data(),
                      static_cast<int64_t>(counts.shape(1)), {vertex_slack, edge_slack, remote_slack}, max_passes,
                      part.data(), counts.data());
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "order"_a.noconvert(), "vertex_slack"_a, "edge_slack"_a,
      "remote_slack"_a, "max_passes"_a, "part"_a.noconvert(), "counts"_a.noconvert());
}

template <class Index>
void bind_cut(nb::module_& module) {
  module.def(
      "cut_rows",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, int64_t num_columns,
         int64_t per_row, int64_t per_column, int64_t per_entry, bool own, int64_t limit, Array<int64_t, 1> bounds) {
        const auto num_rows = static_cast<int64_t>(indptr.shape(0)) - 1;
        require(num_rows >= 0 && bounds.shape(0) == indptr.shape(0), "bounds must be as long as indptr, which has one");
        require(!own || num_rows <= num_columns, "rows that are columns too must not be more than those");
        nb::gil_scoped_release release;
        int64_t most = 0;
        const int64_t count = cut_rows(indptr.data(), indices.data(), num_rows, num_columns,
                                       {per_row, per_column, per_entry, own}, limit, bounds.data(), most);
        return std::make_pair(count, most);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "num_columns"_a, "per_row"_a, "per_column"_a,
      "per_entry"_a, "own"_a, "limit"_a, "bounds"_a.noconvert());
}

template <class T>
void bind_rows(nb::module_& module) {
  module.def(
      "add_rows",
      [](ConstArray<int64_t, 1> rows, ConstArray<T, 2> added, Array<T, 2> target, int num_threads) {
        require(added.shape(0) == rows.shape(0) && added.shape(1) == target.shape(1) && num_threads >= 1,
                "added must have a row for each of rows, as wide as target; num_threads not be below 1");
        require_vertices(rows.data(), rows.shape(0), target.shape(0));
        nb::gil_scoped_release release;
        add_rows(rows.data(), static_cast<int64_t>(rows.shape(0)), added.data(),
                 static_cast<int64_t>(added.shape(1)), target.data(), num_threads);
      },
      "rows"_a.noconvert(), "added"_a.noconvert(), "target"_a.noconvert(), "num_threads"_a);
}

}  // namespace

void bind_partition(nb::module_& module) {
  bind_cut<int32_t>(module);
  bind_cut<int64_t>(module);
  bind_rows<float>(module);
  bind_rows<double>(module);
  bind_methods<int32_t>(module);
  bind_methods<int64_t>(module);
  bind_dependencies<int32_t>(module);
  bind_dependencies<int64_t>(module);
  bind_cover<int32_t>(module);
  bind_cover<int64_t>(module);
}

}  // namespace weft
