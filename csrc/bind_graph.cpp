#include "bindings.h"
#include "graph.h"

namespace weft {
namespace {

using namespace nb::literals;

template <class In, class Index, class Id>
void bind_builders(nb::module_& module) {
  module.def(
      "coo_to_csr",
      [](ConstArray<In, 1> rows, ConstArray<In, 1> cols, int64_t num_cols, Array<int64_t, 1> indptr,
         Array<Index, 1> indices, Array<Id, 1> edge_ids, int num_threads) {
        const size_t num_edges = rows.shape(0);
        require(cols.shape(0) == num_edges && indices.shape(0) == num_edges && edge_ids.shape(0) == num_edges,
                "rows, cols, indices and edge_ids must have the same length");
        require(indptr.shape(0) >= 1 && num_threads >= 1, "indptr must not be empty, num_threads not below 1");
        nb::gil_scoped_release release;
        coo_to_csr(rows.data(), cols.data(), static_cast<int64_t>(num_edges), static_cast<int64_t>(indptr.shape(0)) - 1,
                   num_cols, indptr.data(), indices.data(), edge_ids.data(), num_threads);
      },
      "rows"_a.noconvert(), "cols"_a.noconvert(), "num_cols"_a, "indptr"_a.noconvert(), "indices"_a.noconvert(),
      "edge_ids"_a.noconvert(), "num_threads"_a);
  module.def(
      "transpose",
      [](ConstArray<int64_t, 1> indptr, ConstArray<In, 1> indices, Array<int64_t, 1> indptr_t,
         Array<Index, 1> indices_t, Array<Id, 1> edge_ids, int num_threads) {
        const size_t num_edges = indices.shape(0);
        require(indices_t.shape(0) == num_edges && edge_ids.shape(0) == num_edges,
                "indices, indices_t and edge_ids must have the same length");
        require(indptr.shape(0) >= 1 && indptr_t.shape(0) >= 1 && num_threads >= 1,
                "indptr must not be empty, num_threads not below 1");
        require(indptr.data()[indptr.shape(0) - 1] == static_cast<int64_t>(num_edges),
                "indptr must end at the number of edges");
        nb::gil_scoped_release release;
        transpose(indptr.data(), indices.data(), static_cast<int64_t>(indptr.shape(0)) - 1,
                  static_cast<int64_t>(indptr_t.shape(0)) - 1, indptr_t.data(), indices_t.data(), edge_ids.data(),
                  num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "indptr_t"_a.noconvert(), "indices_t"_a.noconvert(),
      "edge_ids"_a.noconvert(), "num_threads"_a);
}

template <class Index>
void bind_rows(nb::module_& module) {
  module.def(
      "find_loops",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, Array<bool, 1> found, int num_threads) {
        require(indptr.shape(0) == found.shape(0) + 1 && num_threads >= 1,
                "indptr must be one longer than found, num_threads not below 1");
        nb::gil_scoped_release release;
        find_loops(indptr.data(), indices.data(), static_cast<int64_t>(found.shape(0)), found.data(), num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "found"_a.noconvert(), "num_threads"_a);
  module.def(
      "breadth_first",
      [](ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, ConstArray<int64_t, 1> indptr_t,
         ConstArray<Index, 1> indices_t, ConstArray<int64_t, 1> starts, Array<int64_t, 1> order) {
        const size_t num_vertices = order.shape(0);
        require(indptr.shape(0) == num_vertices + 1 && indptr_t.shape(0) == num_vertices + 1 &&
                    starts.shape(0) == num_vertices,
                "starts and order must have the same length, indptr and indptr_t be one longer");
        nb::gil_scoped_release release;
        breadth_first(indptr.data(), indices.data(), indptr_t.data(), indices_t.data(), starts.data(),
                      static_cast<int64_t>(num_vertices), order.data());
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "indptr_t"_a.noconvert(), "indices_t"_a.noconvert(),
      "starts"_a.noconvert(), "order"_a.noconvert());
}

}  // namespace

void bind_graph(nb::module_& module) {
  bind_builders<int32_t, int32_t, int32_t>(module);
  bind_builders<int32_t, int32_t, int64_t>(module);
  bind_builders<int32_t, int64_t, int32_t>(module);
  bind_builders<int32_t, int64_t, int64_t>(module);
  bind_builders<int64_t, int32_t, int32_t>(module);
  bind_builders<int64_t, int32_t, int64_t>(module);
  bind_builders<int64_t, int64_t, int32_t>(module);
  bind_builders<int64_t, int64_t, int64_t>(module);
  bind_rows<int32_t>(module);
  bind_rows<int64_t>(module);
}

}  // namespace weft
