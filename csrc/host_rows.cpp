#include "host_rows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace weft {
namespace {

// Measured on one machine with the file in the page cache: smaller spans and gaps cost up to a half of the rate.
constexpr int64_t kSpanBytes = 1 << 20;  // moved at once
constexpr int64_t kGapBytes = 1 << 14;   // read, and written back, rather than left out

int read_all(int file, int64_t offset, int64_t num_bytes, char* to) {
  while (num_bytes > 0) {
    const ssize_t count = pread(file, to, num_bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;  // 0: the file ends
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

// Calls work(first, stop, buffer) for ranges of `rows` that lie so near in the file that they are moved at once.
template <class T, class Work>
int in_spans(const int64_t* rows, int64_t num_rows, int64_t width, int num_threads, Work work) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  if (num_rows == 0 || row_bytes == 0) return 0;
  const int64_t at_once = std::max<int64_t>(1, kSpanBytes / row_bytes);
  const int64_t buffer_rows = std::min(at_once, rows[num_rows - 1] - rows[0] + 1);
  const int64_t num_chunks = (num_rows + at_once - 1) / at_once;
  std::atomic<int> failure{0};
#pragma omp parallel num_threads(static_cast<int>(std::min<int64_t>(num_threads, num_chunks)))
  {
    const std::unique_ptr<T[]> buffer(new (std::nothrow) T[buffer_rows * width]);
    if (!buffer) failure = ENOMEM;
#pragma omp for schedule(dynamic)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const int64_t end = std::min(num_rows, (chunk + 1) * at_once);
      for (int64_t first = chunk * at_once, stop; first < end && failure == 0; first = stop) {
        stop = first + 1;
        while (stop < end && (rows[stop] - rows[stop - 1] - 1) * row_bytes <= kGapBytes &&
               rows[stop] - rows[first] < at_once) {
          ++stop;
        }
        if (const int error = work(first, stop, buffer.get())) failure = error;
      }
    }
  }
  return failure;
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

int zero_bytes(int file, int64_t num_bytes) {
#ifdef FALLOC_FL_ZERO_RANGE
  if (num_bytes == 0 || fallocate(file, FALLOC_FL_ZERO_RANGE, 0, num_bytes) == 0) return 0;
#endif
  const std::vector<char> zeros(std::min(num_bytes, kSpanBytes));
  return in_pieces(num_bytes, 1, [&](int64_t first, int64_t count) {
    return write_all(file, first, count, zeros.data());
  });
}

int release_pages(uintptr_t address, int64_t num_bytes) {
  const uintptr_t before = address % static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const int result = madvise(reinterpret_cast<void*>(address - before), num_bytes + before, MADV_DONTNEED);
  return result == 0 ? 0 : errno;
}

template <class T>
int gather_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t width, T* out,
                     int num_threads) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  return in_spans<T>(rows, num_rows, width, num_threads, [=](int64_t first, int64_t stop, T* buffer) {
    const int64_t span_bytes = (rows[stop - 1] - rows[first] + 1) * row_bytes;
    const bool straight = is_run(rows, first, stop) && is_run(places, first, stop);
    T* to = straight ? out + places[first] * width : buffer;
    const int error = read_all(file, rows[first] * row_bytes, span_bytes, reinterpret_cast<char*>(to));
    if (error != 0 || straight) return error;
    for (int64_t i = first; i < stop; ++i) {
      std::memcpy(out + places[i] * width, buffer + (rows[i] - rows[first]) * width, row_bytes);
    }
    return 0;
  });
}

template <class T>
int add_file_rows(int file, const int64_t* rows, const int64_t* places, int64_t num_rows, int64_t width,
                  const T* values, int num_threads) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  std::mutex writes;  // the system locks a file for each write, and spins
  return in_spans<T>(rows, num_rows, width, num_threads, [&, row_bytes](int64_t first, int64_t stop, T* buffer) {
    const int64_t offset = rows[first] * row_bytes, span_bytes = (rows[stop - 1] - rows[first] + 1) * row_bytes;
    char* bytes = reinterpret_cast<char*>(buffer);
    if (const int error = read_all(file, offset, span_bytes, bytes)) return error;
    for (int64_t i = first; i < stop; ++i) {
      T* to = buffer + (rows[i] - rows[first]) * width;
      const T* from = values + places[i] * width;
      for (int64_t column = 0; column < width; ++column) to[column] += from[column];
    }
    const std::lock_guard<std::mutex> lock(writes);
    return write_all(file, offset, span_bytes, bytes);
  });
}

#define WEFT_INSTANTIATE(T)                                                                                      \
  template int gather_file_rows(int, const int64_t*, const int64_t*, int64_t, int64_t, T*, int);                \
  template int add_file_rows(int, const int64_t*, const int64_t*, int64_t, int64_t, const T*, int);
WEFT_INSTANTIATE(float)
WEFT_INSTANTIATE(double)

}  // namespace weft
