#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "bindings.h"
#include "isa.h"

namespace weft {
namespace {

using namespace nb::literals;

constexpr int64_t kGroups = 16;            // of the tiles of a super-tile, whatever the number of threads
constexpr int64_t kSuperEdges = 1 << 14;   // of a super-tile, at least
constexpr int64_t kPadding = 64;           // numbers that kernels may read or write after an array

// Divides targets into ranges of at most `size` edges and targets, or of one target.
std::vector<MessageTile> tiles_of(const int64_t* indptr, int64_t num_targets, int64_t size) {
  std::vector<MessageTile> tiles;
  for (int64_t first = 0; first < num_targets;) {
    const int64_t* const end = indptr + std::min(first + size, num_targets) + 1;
    const int64_t* const beyond = std::upper_bound(indptr + first + 1, end, indptr[first] + size);
    const int64_t last = std::max<int64_t>(beyond - indptr - 1, first + 1);
    tiles.push_back({first, last, indptr[first], indptr[last]});
    first = last;
  }
  return tiles;
}

// Divides tiles into super-tiles, of which each but the last has at least kSuperEdges edges or targets.
std::vector<int64_t> supers_of(const std::vector<MessageTile>& tiles) {
  std::vector<int64_t> supers;
  const MessageTile* first = nullptr;
  for (const MessageTile& tile : tiles) {
    const bool fills = first && (tile.first_edge - first->first_edge >= kSuperEdges ||
                                 tile.first_target - first->first_target >= kSuperEdges);
    if (first && !fills) continue;
    first = &tile;
    supers.push_back(&tile - tiles.data());
  }
  supers.push_back(static_cast<int64_t>(tiles.size()));
  return supers;
}

template <class T>
void bind(nb::module_& module) {
  using Ids = ConstArray<int64_t, 1>;
  module.def(
      "run_messages",
      [](ConstArray<int64_t, 2> operations, ConstArray<double, 1> constants, Ids slot_offset, int64_t memory_per_thread,
         std::vector<Array<T, 1>> tensors, Ids indptr, Ids sources, std::optional<Ids> order, int64_t tile_edges,
         int64_t capacity, ConstArray<bool, 1> levels, Ids staged_width, Ids staged_tensor, Array<T, 1> totals,
         int num_threads) {
        require(operations.shape(1) * sizeof(int64_t) == sizeof(MessageOperation), "an operation has other fields");
        require(indptr.shape(0) >= 1 && indptr.data()[indptr.shape(0) - 1] == static_cast<int64_t>(sources.shape(0)),
                "indptr must end at the number of edges");
        require(tile_edges >= 1 && capacity >= tile_edges && num_threads >= 1, "tiles and threads must be positive");
        std::vector<T*> data;
        for (const auto& tensor : tensors) data.push_back(tensor.data());
        nb::gil_scoped_release release;
        const auto tiles = tiles_of(indptr.data(), static_cast<int64_t>(indptr.shape(0)) - 1, tile_edges);
        if (tiles.empty()) return;
        const auto supers = supers_of(tiles);
        int64_t most = 0;
        for (size_t super = 0; super + 1 < supers.size(); ++super) {
          most = std::max(most, tiles[supers[super + 1] - 1].end_edge - tiles[supers[super]].first_edge);
        }
        const auto num_staged = static_cast<int64_t>(staged_width.shape(0));
        const auto num_totals = static_cast<int64_t>(totals.shape(0));
        std::vector<std::unique_ptr<T[]>> staged;
        std::vector<T*> staging;
        for (int64_t rows = 0; rows < num_staged; ++rows) {
          staged.emplace_back(new T[most * staged_width.data()[rows] + kPadding]);
          staging.push_back(staged.back().get());
        }
        const std::unique_ptr<T[]> memory(new T[num_threads * memory_per_thread]);
        const std::unique_ptr<T[]> group_totals(new T[kGroups * num_totals + kPadding]);
        const MessageRun<T> run{reinterpret_cast<const MessageOperation*>(operations.data()),
                                constants.data(),
                                static_cast<int64_t>(operations.shape(0)),
                                slot_offset.data(),
                                memory.get(),
                                memory_per_thread,
                                data.data(),
                                indptr.data(),
                                sources.data(),
                                order ? order->data() : nullptr,
                                capacity,
                                static_cast<int64_t>(levels.shape(0)),
                                levels.data(),
                                tiles.data(),
                                supers.data(),
                                static_cast<int64_t>(supers.size()) - 1,
                                kGroups,
                                staging.data(),
                                num_staged,
                                staged_width.data(),
                                staged_tensor.data(),
                                totals.data(),
                                group_totals.get(),
                                num_totals,
                                num_threads};
        static_cast<const MessageKernels<T>&>(kernels()).run_messages(run);
      },
      "operations"_a.noconvert(), "constants"_a.noconvert(), "slot_offset"_a.noconvert(), "memory_per_thread"_a,
      "tensors"_a.noconvert(), "indptr"_a.noconvert(), "sources"_a.noconvert(), "order"_a.noconvert().none(),
      "tile_edges"_a, "capacity"_a, "levels"_a.noconvert(), "staged_width"_a.noconvert(),
      "staged_tensor"_a.noconvert(), "totals"_a.noconvert(), "num_threads"_a);
}

}  // namespace

void bind_messages(nb::module_& module) {
  bind<float>(module);
  bind<double>(module);
}

}  // namespace weft
