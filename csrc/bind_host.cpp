#include <cerrno>

#include "bindings.h"
#include "host_rows.h"

namespace weft {
namespace {

using namespace nb::literals;

// Runs a function that returns an errno, without the GIL; raises OSError unless it returns 0.
template <class Work>
void without_lock(Work work) {
  int error;
  {
    nb::gil_scoped_release release;
    error = work();
  }
  if (error == 0) return;
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// Checks that rows ascend and are distinct, and that each place is in [0, limit).
void require_rows(const ConstArray<int64_t, 1>& rows, const ConstArray<int64_t, 1>& places, size_t limit) {
  require(rows.shape(0) == places.shape(0), "rows and places must have the same length");
  for (size_t i = 0; i < rows.shape(0); ++i) {
    require(rows.data()[i] > (i == 0 ? -1 : rows.data()[i - 1]), "rows must ascend from 0 and be distinct");
    require(places.data()[i] >= 0 && static_cast<size_t>(places.data()[i]) < limit, "places must lie within the array");
  }
}

template <class T>
void bind_add_file_rows(nb::module_& module) {
  module.def(
      "add_file_rows",
      [](int file, ConstArray<int64_t, 1> rows, ConstArray<int64_t, 1> places, ConstArray<T, 2> values,
         int64_t num_rows, int64_t block_rows, Array<uint8_t, 1> cleared, int num_threads) {
        require_rows(rows, places, values.shape(0));
        require(num_threads >= 1 && block_rows >= 1, "num_threads and block_rows must not be below 1");
        require(static_cast<int64_t>(cleared.shape(0)) == (num_rows + block_rows - 1) / block_rows,
                "cleared must have a number for each block");
        const size_t count = rows.shape(0);
        require(count == 0 || rows.data()[count - 1] < num_rows, "rows must lie within the file");
        without_lock([&] {
          return add_file_rows(file, rows.data(), places.data(), static_cast<int64_t>(count),
                               static_cast<int64_t>(values.shape(1)), values.data(),
                               Blocks{num_rows, block_rows, cleared.data()}, num_threads);
        });
      },
      "file"_a, "rows"_a.noconvert(), "places"_a.noconvert(), "values"_a.noconvert(), "num_rows"_a, "block_rows"_a,
      "cleared"_a.noconvert(), "num_threads"_a);
}

}  // namespace

void bind_host(nb::module_& module) {
  module.def(
      "read_bytes",
      [](int file, int64_t offset, Array<uint8_t, 1> out, int num_threads) {
        require(offset >= 0 && num_threads >= 1, "offset must not be below 0, num_threads not below 1");
        without_lock([&] {
          return read_bytes(file, offset, static_cast<int64_t>(out.shape(0)), reinterpret_cast<char*>(out.data()),
                            num_threads);
        });
      },
      "file"_a, "offset"_a, "out"_a.noconvert(), "num_threads"_a);
  module.def(
      "write_bytes",
      [](int file, int64_t offset, ConstArray<uint8_t, 1> bytes) {
        require(offset >= 0, "offset must not be below 0");
        without_lock([&] {
          return write_bytes(file, offset, static_cast<int64_t>(bytes.shape(0)),
                             reinterpret_cast<const char*>(bytes.data()));
        });
      },
      "file"_a, "offset"_a, "bytes"_a.noconvert());
  module.def(
      "release_pages",
      [](uintptr_t address, int64_t num_bytes) { without_lock([=] { return release_pages(address, num_bytes); }); },
      "address"_a, "num_bytes"_a);
  module.def(
      "gather_file_rows",
      [](int file, ConstArray<int64_t, 1> rows, ConstArray<int64_t, 1> places, Array<uint8_t, 2> out, int num_threads) {
        require_rows(rows, places, out.shape(0));
        require(num_threads >= 1, "num_threads must not be below 1");
        without_lock([&] {
          return gather_file_rows(file, rows.data(), places.data(), static_cast<int64_t>(rows.shape(0)),
                                  static_cast<int64_t>(out.shape(1)), reinterpret_cast<char*>(out.data()), num_threads);
        });
      },
      "file"_a, "rows"_a.noconvert(), "places"_a.noconvert(), "out"_a.noconvert(), "num_threads"_a);
  bind_add_file_rows<float>(module);
  bind_add_file_rows<double>(module);
}

}  // namespace weft
