#include <nanobind/stl/optional.h>

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "reorder.h"
#include "schedule.h"

namespace weft {
namespace {

using namespace nb::literals;

using Starts = ConstArray<int64_t, 1>;

// Checks that starts ascend within [0, most], so that every range between two of them is valid.
void require_starts(const Starts& starts, size_t most) {
  require(starts.shape(0) >= 1, "starts must hold at least one number");
  const int64_t *begin = starts.data(), *end = begin + starts.shape(0);
  require(*begin >= 0 && std::is_sorted(begin, end) && end[-1] <= static_cast<int64_t>(most),
          "starts must ascend within what they divide");
}

template <class Index>
void bind_sets(nb::module_& module) {
  module.def(
      "distinct",
      [](ConstArray<Index, 1> values, Starts starts, std::optional<Starts> ranges, int64_t num_numbers,
         Array<Index, 1> found, Array<int64_t, 1> counts, int num_threads) {
        require_starts(starts, values.shape(0));
        const size_t num_groups = starts.shape(0) - 1;
        require(counts.shape(0) == num_groups && num_numbers >= 0 && num_threads >= 1,
                "counts must be one shorter than starts, num_threads not be below 1");
        int64_t room = starts.data()[num_groups] - starts.data()[0];
        if (ranges) {
          require(ranges->shape(0) == num_groups + 1, "ranges must be as long as starts");
          require_starts(*ranges, static_cast<size_t>(num_numbers));
          room += ranges->data()[num_groups] - ranges->data()[0];
        }
        require(static_cast<int64_t>(found.shape(0)) >= room, "found must have room for all numbers");
        nb::gil_scoped_release release;
        distinct(values.data(), starts.data(), ranges ? ranges->data() : nullptr, static_cast<int64_t>(num_groups),
                 num_numbers, found.data(), counts.data(), num_threads);
      },
      "values"_a.noconvert(), "starts"_a.noconvert(), "ranges"_a.none(), "num_numbers"_a, "found"_a.noconvert(),
      "counts"_a.noconvert(), "num_threads"_a);
  module.def(
      "find_missing",
      [](ConstArray<Index, 1> numbers, ConstArray<Index, 1> others, Array<bool, 1> missing) {
        require(missing.shape(0) == numbers.shape(0), "missing must be as long as numbers");
        nb::gil_scoped_release release;
        find_missing(numbers.data(), static_cast<int64_t>(numbers.shape(0)), others.data(),
                     static_cast<int64_t>(others.shape(0)), missing.data());
      },
      "numbers"_a.noconvert(), "others"_a.noconvert(), "missing"_a.noconvert());
  module.def(
      "keep_rows",
      [](ConstArray<Index, 1> held, ConstArray<int32_t, 1> held_uses, ConstArray<Index, 1> read,
         ConstArray<int32_t, 1> read_uses, int32_t round, int64_t room, bool ahead, Array<Index, 1> numbers,
         Array<int32_t, 1> next_uses, Array<bool, 1> fresh, Array<bool, 1> leaving) {
        const size_t most = held.shape(0) + read.shape(0);
        require(held_uses.shape(0) == held.shape(0) && read_uses.shape(0) == read.shape(0) &&
                    leaving.shape(0) == held.shape(0),
                "uses must be as long as their numbers, leaving as held");
        require(numbers.shape(0) == most && next_uses.shape(0) == most && fresh.shape(0) == most,
                "results must have room for all numbers");
        require(room >= 0, "room must not be below 0");
        nb::gil_scoped_release release;
        return keep_rows<Index>({held.data(), held_uses.data(), static_cast<int64_t>(held.shape(0))},
                                {read.data(), read_uses.data(), static_cast<int64_t>(read.shape(0))}, round, room,
                                ahead, numbers.data(), next_uses.data(), fresh.data(), leaving.data());
      },
      "held"_a.noconvert(), "held_uses"_a.noconvert(), "read"_a.noconvert(), "read_uses"_a.noconvert(), "round"_a,
      "room"_a, "ahead"_a, "numbers"_a.noconvert(), "next_uses"_a.noconvert(), "fresh"_a.noconvert(),
      "leaving"_a.noconvert());
  module.def(
      "reorder_chunks",
      [](Starts starts, ConstArray<Index, 1> members, Array<int64_t, 2> orders, int num_threads) {
        require_starts(starts, members.shape(0));
        require(num_threads >= 1, "num_threads must not be below 1");
        nb::gil_scoped_release release;
        reorder_chunks(starts.data(), members.data(), static_cast<int64_t>(starts.shape(0)) - 1,
                       static_cast<int64_t>(orders.shape(0)), static_cast<int64_t>(orders.shape(1)), orders.data(),
                       num_threads);
      },
      "starts"_a.noconvert(), "members"_a.noconvert(), "orders"_a.noconvert(), "num_threads"_a);
}

}  // namespace

void bind_schedule(nb::module_& module) {
  bind_sets<int32_t>(module);
  bind_sets<int64_t>(module);
}

}  // namespace weft
