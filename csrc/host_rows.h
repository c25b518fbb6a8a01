// Rows in a file of the host, moved through the page cache: what is mapped would count as this process's memory.
#pragma once

#include <algorithm>
#include <cstdint>

namespace weft {

// All return 0, or the errno of the first call that failed. Each thread has one buffer of at most kSpanBytes, or one
// row or block.

// Moves bytes between a file, from `offset` on, and memory. The system lets but one thread at a time write to a file.
int read_bytes(int file, int64_t offset, int64_t num_bytes, char* to, int num_threads);
int write_bytes(int file, int64_t offset, int64_t num_bytes, const char* from);

// Gives back the resident pages under some bytes of a mapping that is shared with a file.
int release_pages(uintptr_t address, int64_t num_bytes);

// out[places[i]] = the file's rows[i], of `width` numbers each. rows ascend and are distinct, so are places.
template <class T>
int gather_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t width, T* out,
                     int num_threads);

// The blocks of `size` rows that a file's rows are in. Where cleared[block] is not 0, they are zero, whatever it has there.
struct Blocks {
  int64_t num_rows, size;
  uint8_t* cleared;

  int64_t of(int64_t row) const { return row / size; }
  int64_t end_of(int64_t row) const { return std::min(num_rows, (of(row) + 1) * size); }
  bool is_cleared(int64_t row) const { return cleared[of(row)] != 0; }
};

// The file's rows[i] += values[places[i]]; cleared blocks that have such a row are written as a whole, and cleared no
// more. rows ascend and are distinct. Rows between them may be written back as they were read: nobody else may write to
// the file meanwhile.
template <class T>
int add_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t width,
                  const T* values, Blocks blocks, int num_threads);

}  // namespace weft
