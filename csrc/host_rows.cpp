#include "host_rows.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

namespace weft {
namespace {

// Measured on one machine with the file in the page cache: smaller values lose up to half of the rate.
constexpr int64_t kSpanBytes = 1 << 20;  // bytes of a read or a write
constexpr int64_t kGapBytes = 1 << 14;   // gap between rows that is read (and written back) rather than skipped

int read_all(int file, int64_t offset, int64_t num_bytes, char* to) {
  while (num_bytes > 0) {
    const ssize_t count = pread(file, to, num_bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;  // 0: end of the file
    offset += count, to += count, num_bytes -= count;
  }
  return 0;
}

int write_all(int file, int64_t offset, int64_t num_bytes, const char* from) {
  while (num_bytes > 0) {
    const ssize_t count = pwrite(file, from, num_bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    offset += count, from += count, num_bytes -= count;
  }
  return 0;
}

// Calls move(first, count) for pieces of `num_bytes`, until one fails.
template <class Move>
int in_pieces(int64_t num_bytes, int num_threads, Move move) {
  const int64_t num_pieces = (num_bytes + kSpanBytes - 1) / kSpanBytes;
  std::atomic<int> failure{0};
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t piece = 0; piece < num_pieces; ++piece) {
    const int64_t first = piece * kSpanBytes;
    if (failure != 0) continue;
    if (const int error = move(first, std::min(kSpanBytes, num_bytes - first))) failure = error;
  }
  return failure;
}

// Calls work(piece, buffer) for pieces [first, end) until one fails; each thread has a buffer of `size` numbers.
template <class T, class Work>
int with_buffers(int64_t first, int64_t end, int64_t size, int num_threads, Work work) {
  std::atomic<int> failure{0};
#pragma omp parallel num_threads(static_cast<int>(std::min<int64_t>(num_threads, end - first)))
  {
    const std::unique_ptr<T[]> buffer(new (std::nothrow) T[size]);
    if (!buffer) failure = ENOMEM;
#pragma omp for schedule(dynamic)
    for (int64_t piece = first; piece < end; ++piece) {
      if (failure != 0) continue;
      if (const int error = work(piece, buffer.get())) failure = error;
    }
  }
  return failure;
}

// Reads rows [begin, end); rows of cleared blocks are zeros.
int read_rows(int file, int64_t begin, int64_t end, int64_t row_bytes, const Blocks& blocks, char* to) {
  for (int64_t row = begin, next; row < end; row = next) {
    const bool cleared = blocks.is_cleared(row);
    for (next = row; next < end && blocks.is_cleared(next) == cleared;) next = blocks.end_of(next);
    next = std::min(next, end);
    char* const at = to + (row - begin) * row_bytes;
    if (cleared) {
      std::memset(at, 0, (next - row) * row_bytes);
    } else if (const int error = read_all(file, row * row_bytes, (next - row) * row_bytes, at)) {
      return error;
    }
  }
  return 0;
}

bool is_run(const int64_t* ids, int64_t first, int64_t stop) {
  if (ids[stop - 1] - ids[first] != stop - 1 - first) return false;
  for (int64_t i = first + 1; i < stop; ++i) {
    if (ids[i] != ids[i - 1] + 1) return false;
  }
  return true;
}

}  // namespace

int read_bytes(int file, int64_t offset, int64_t num_bytes, char* to, int num_threads) {
  return in_pieces(num_bytes, num_threads, [=](int64_t first, int64_t count) {
    return read_all(file, offset + first, count, to + first);
  });
}

int write_bytes(int file, int64_t offset, int64_t num_bytes, const char* from) {
  return write_all(file, offset, num_bytes, from);
}

int release_pages(uintptr_t address, int64_t num_bytes) {
  const uintptr_t before = address % static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const int result = madvise(reinterpret_cast<void*>(address - before), num_bytes + before, MADV_DONTNEED);
  return result == 0 ? 0 : errno;
}

int gather_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t row_bytes,
                     char* out, int num_threads) {
  if (num_rows == 0 || row_bytes == 0) return 0;
  const int64_t at_once = std::max<int64_t>(1, kSpanBytes / row_bytes), num_pieces = (num_rows + at_once - 1) / at_once;
  const int64_t buffer_rows = std::min(at_once, rows[num_rows - 1] - rows[0] + 1);
  return with_buffers<char>(0, num_pieces, buffer_rows * row_bytes, num_threads, [=](int64_t piece, char* buffer) {
    const int64_t end = std::min(num_rows, (piece + 1) * at_once);
    for (int64_t first = piece * at_once, stop; first < end; first = stop) {
      stop = first + 1;
      while (stop < end && (rows[stop] - rows[stop - 1] - 1) * row_bytes <= kGapBytes &&
             rows[stop] - rows[first] < at_once) {
        ++stop;
      }
      const bool straight = is_run(rows, first, stop) && is_run(places, first, stop);
      char* to = straight ? out + places[first] * row_bytes : buffer;
      const int64_t span_bytes = (rows[stop - 1] - rows[first] + 1) * row_bytes;
      if (const int error = read_all(file, rows[first] * row_bytes, span_bytes, to)) return error;
      for (int64_t i = first; i < stop && !straight; ++i) {
        std::memcpy(out + places[i] * row_bytes, buffer + (rows[i] - rows[first]) * row_bytes, row_bytes);
      }
    }
    return 0;
  });
}

template <class T>
int add_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t width,
                  const T* values, Blocks blocks, int num_threads) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  if (num_rows == 0 || row_bytes == 0) return 0;
  const int64_t at_once = std::max<int64_t>(1, kSpanBytes / (blocks.size * row_bytes)) * blocks.size;
  const int64_t first_piece = rows[0] / at_once, end_piece = rows[num_rows - 1] / at_once + 1;
  const int64_t buffer_size = std::min(at_once, blocks.num_rows) * width;
  std::mutex writes;  // the system locks a file for each write, and waiting threads spin
  return with_buffers<T>(first_piece, end_piece, buffer_size, num_threads, [&](int64_t piece, T* buffer) {
    const int64_t* const last = std::lower_bound(rows, rows + num_rows, (piece + 1) * at_once);
    const int64_t* stop;
    for (const int64_t* first = std::lower_bound(rows, rows + num_rows, piece * at_once); first < last; first = stop) {
      stop = first + 1;
      while (stop < last && blocks.of(*stop) - blocks.of(stop[-1]) <= 1) ++stop;
      const int64_t begin = blocks.is_cleared(*first) ? blocks.of(*first) * blocks.size : *first;
      const int64_t end = blocks.is_cleared(stop[-1]) ? blocks.end_of(stop[-1]) : stop[-1] + 1;
      char* const bytes = reinterpret_cast<char*>(buffer);
      if (const int error = read_rows(file, begin, end, row_bytes, blocks, bytes)) return error;
      for (const int64_t* row = first; row < stop; ++row) {
        T* to = buffer + (*row - begin) * width;
        const T* from = values + places[row - rows] * width;
        for (int64_t column = 0; column < width; ++column) to[column] += from[column];
      }
      const std::lock_guard<std::mutex> lock(writes);
      if (const int error = write_all(file, begin * row_bytes, (end - begin) * row_bytes, bytes)) return error;
      std::fill(blocks.cleared + blocks.of(begin), blocks.cleared + blocks.of(end - 1) + 1, uint8_t{0});
    }
    return 0;
  });
}

#define WEFT_INSTANTIATE(T) \
  template int add_file_rows(int, const int64_t*, const int64_t*, int64_t, int64_t, const T*, Blocks, int);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(double)

}  // namespace weft
