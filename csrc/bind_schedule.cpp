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

// Checks that the sets for which numbers stay exist, and fills the starts of the extended sets.
void find_extended_starts(const Starts& starts, const ConstArray<int64_t, 1>& until, int64_t* extended) {
  require_starts(starts, until.shape(0));
  const auto num_sets = static_cast<int64_t>(starts.shape(0)) - 1;
  const int64_t* const end = until.data() + until.shape(0);
  require(std::all_of(until.data(), end, [=](int64_t set) { return set >= 0 && set <= num_sets; }),
          "until must hold numbers of sets");
  extended_starts(starts.data(), num_sets, until.data(), extended);
}

template <class Index>
void bind_sets(nb::module_& module) {
  module.def(
      "distinct",
      [](ConstArray<Index, 1> values, Starts starts, std::optional<Starts> ranges, int64_t num_numbers,
         Array<int64_t, 1> found, Array<int64_t, 1> counts, int num_threads) {
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
      "assign_slots",
      [](ConstArray<int64_t, 1> numbers, Starts starts, ConstArray<bool, 1> fresh, ConstArray<bool, 1> leaving,
         int64_t num_numbers, ConstArray<int64_t, 1> indptr, ConstArray<Index, 1> indices, Starts bounds,
         ConstArray<int64_t, 1> order, bool ahead, Array<int64_t, 1> slots, Array<Index, 1> places,
         std::optional<Array<int64_t, 1>> own, int num_threads) {
        require_starts(starts, numbers.shape(0));
        require(indptr.shape(0) >= 1 && num_threads >= 1, "indptr must hold a number, num_threads not be below 1");
        require_starts(bounds, indptr.shape(0) - 1);
        const size_t count = starts.shape(0) - 1;
        require(order.shape(0) == count && bounds.shape(0) == count + 1,
                "bounds must be as long as starts, order one shorter");
        require(std::all_of(order.data(), order.data() + count,
                            [=](int64_t chunk) { return chunk >= 0 && static_cast<size_t>(chunk) < count; }),
                "order must hold numbers of chunks");
        require(fresh.shape(0) == numbers.shape(0) && leaving.shape(0) == numbers.shape(0) &&
                    slots.shape(0) == numbers.shape(0) && places.shape(0) == indices.shape(0),
                "fresh, leaving and slots must be as long as numbers, places as indices");
        require(!own || own->shape(0) + 1 == indptr.shape(0), "own must have a number for each target");
        nb::gil_scoped_release release;
        const Batches<Index> batches{indptr.data(), indices.data(), bounds.data(), order.data(),
                                     static_cast<int64_t>(count)};
        return assign_slots(numbers.data(), starts.data(), fresh.data(), leaving.data(), num_numbers, batches, ahead,
                            slots.data(), places.data(), own ? own->data() : nullptr, num_threads);
      },
      "numbers"_a.noconvert(), "starts"_a.noconvert(), "fresh"_a.noconvert(), "leaving"_a.noconvert(), "num_numbers"_a,
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "bounds"_a.noconvert(), "order"_a.noconvert(), "ahead"_a,
      "slots"_a.noconvert(), "places"_a.noconvert(), "own"_a.none(), "num_threads"_a);
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
  module.def(
      "find_changes",
      [](ConstArray<int64_t, 1> numbers, Starts starts, Array<bool, 1> fresh, Array<bool, 1> leaving,
         int num_threads) {
        require_starts(starts, numbers.shape(0));
        require(fresh.shape(0) == numbers.shape(0) && leaving.shape(0) == numbers.shape(0) && num_threads >= 1,
                "fresh and leaving must be as long as numbers, num_threads not be below 1");
        nb::gil_scoped_release release;
        find_changes(numbers.data(), starts.data(), static_cast<int64_t>(starts.shape(0)) - 1, fresh.data(),
                     leaving.data(), num_threads);
      },
      "numbers"_a.noconvert(), "starts"_a.noconvert(), "fresh"_a.noconvert(), "leaving"_a.noconvert(), "num_threads"_a);
  module.def(
      "stay_until",
      [](ConstArray<int64_t, 1> numbers, Starts starts, int64_t num_numbers, ConstArray<int64_t, 1> room, bool ahead,
         Array<int64_t, 1> until) {
        require_starts(starts, numbers.shape(0));
        require(room.shape(0) + 1 == starts.shape(0) && until.shape(0) == numbers.shape(0),
                "room must be as long as there are sets, until as long as numbers");
        for (size_t i = 0; i < numbers.shape(0); ++i) {
          require(numbers.data()[i] >= 0 && numbers.data()[i] < num_numbers, "numbers must be below num_numbers");
        }
        for (size_t i = 0; i < room.shape(0); ++i) require(room.data()[i] >= 0, "room must not be below 0");
        nb::gil_scoped_release release;
        stay_until(numbers.data(), starts.data(), static_cast<int64_t>(room.shape(0)), num_numbers, room.data(), ahead,
                   until.data());
      },
      "numbers"_a.noconvert(), "starts"_a.noconvert(), "num_numbers"_a, "room"_a.noconvert(), "ahead"_a,
      "until"_a.noconvert());
  module.def(
      "extended_starts",
      [](Starts starts, ConstArray<int64_t, 1> until, Array<int64_t, 1> extended) {
        require(extended.shape(0) == starts.shape(0), "extended must be as long as starts");
        find_extended_starts(starts, until, extended.data());
      },
      "starts"_a.noconvert(), "until"_a.noconvert(), "extended"_a.noconvert());
  module.def(
      "extend_sets",
      [](ConstArray<int64_t, 1> numbers, Starts starts, ConstArray<int64_t, 1> until, Array<int64_t, 1> extended) {
        std::vector<int64_t> extended_starts(starts.shape(0));
        find_extended_starts(starts, until, extended_starts.data());
        require(numbers.shape(0) == until.shape(0) &&
                    static_cast<int64_t>(extended.shape(0)) == extended_starts.back(),
                "until must be as long as numbers, extended have room for all numbers");
        nb::gil_scoped_release release;
        extend_sets(numbers.data(), starts.data(), static_cast<int64_t>(starts.shape(0)) - 1, until.data(),
                    extended.data());
      },
      "numbers"_a.noconvert(), "starts"_a.noconvert(), "until"_a.noconvert(), "extended"_a.noconvert());
}

}  // namespace weft
