// Rows in a file, read and written through the page cache. They are not memory-mapped, since mapped pages count as
// memory of the process.
#pragma once

#include <algorithm>
#include <cstdint>

namespace weft {

// All functions return 0, or the errno of the first call that failed. Each thread has one buffer of at most kSpanBytes,
// or of one row or block if that is larger.

// Copies bytes between memory and a file, from `offset` on. Writes use one thread, since the system lets only one
// thread at a time write to a file.
int read_bytes(int file, int64_t offset, int64_t num_bytes, char* to, int num_threads);
int write_bytes(int file, int64_t offset, int64_t num_bytes, const char* from);

// Releases the resident pages of a range of bytes in a shared mapping of a file.
int release_pages(uintptr_t address, int64_t num_bytes);

// Row places[i] of `out` = row rows[i] of the file; rows have `row_bytes` bytes. rows ascend and are distinct; so do
// places.
int gather_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t row_bytes,
                     char* out, int num_threads);

// The rows of a file in blocks of `size` rows. If cleared[block] is not 0, its rows count as zero, whatever the file
// has.
struct Blocks {
  int64_t num_rows, size;
  uint8_t* cleared;

  int64_t of(int64_t row) const { return row / size; }
  int64_t end_of(int64_t row) const { return std::min(num_rows, (of(row) + 1) * size); }
  bool is_cleared(int64_t row) const { return cleared[of(row)] != 0; }
};

// Adds values[places[i]] to row rows[i] of the file. A cleared block with such a row is written as a whole, and is not
// cleared afterwards. rows ascend and are distinct. Rows between them may be read and written back unchanged, so
// nothing else may write to the file meanwhile.
template <class T>
int add_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t width,
                  const T* values, Blocks blocks, int num_threads);

}  // namespace weft
