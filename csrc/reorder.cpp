#include "reorder.h"

#include <algorithm>
#include <vector>

namespace weft {
namespace {

constexpr int64_t kWordBits = 64;

// Counts the vertices that each row set has in common with each column set. A vertex in few sets increments the count
// of each pair. Otherwise it sets a bit in each of its sets; after kVertices such vertices, the bits of all pairs are
// compared.
class Overlaps {
 public:
  Overlaps(int64_t rows, int64_t cols)
      : rows_(rows), cols_(cols), counts_(rows * cols), row_bits_(rows * kWords), col_bits_(cols * kWords) {}

  // Adds a vertex that is in these row and column sets.
  void add(const std::vector<int64_t>& rows, const std::vector<int64_t>& cols) {
    const auto num_pairs = static_cast<int64_t>(rows.size() * cols.size());
    if (num_pairs * kWordBits <= rows_ * cols_) {
      for (const int64_t row : rows) {
        int32_t* counts = counts_.data() + row * cols_;
        for (const int64_t col : cols) ++counts[col];
      }
      return;
    }
    const int64_t word = num_waiting_ / kWordBits;
    const uint64_t bit = uint64_t{1} << (num_waiting_ % kWordBits);
    for (const int64_t row : rows) row_bits_[row * kWords + word] |= bit;
    for (const int64_t col : cols) col_bits_[col * kWords + word] |= bit;
    if (++num_waiting_ == kVertices) compare();
  }

  // Adds the counts of `others`. Call it after the last vertex of `others`.
  void merge(Overlaps& others) {
    others.compare();
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += others.counts_[i];
  }

  const int32_t* row(int64_t row) const { return counts_.data() + row * cols_; }

 private:
  static constexpr int64_t kWords = 64, kVertices = kWords * kWordBits;

  // The number of bits that two sets have in common. Each byte of a word counts its own bits: portable code that
  // compilers vectorize.
  static int32_t common(const uint64_t* a, const uint64_t* b) {
    constexpr int64_t kStep = 16;  // words that a byte can count: fewer than 32, with up to 8 bits each
    int32_t total = 0;
    for (int64_t begin = 0; begin < kWords; begin += kStep) {
      uint64_t bytes = 0;
      for (int64_t word = begin; word < begin + kStep; ++word) {
        uint64_t bits = a[word] & b[word];
        bits -= (bits >> 1) & 0x5555555555555555;
        bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333);
        bytes += (bits + (bits >> 4)) & 0x0f0f0f0f0f0f0f0f;
      }
      bytes = (bytes & 0x00ff00ff00ff00ff) + ((bytes >> 8) & 0x00ff00ff00ff00ff);
      total += static_cast<int32_t>((bytes * 0x0001000100010001) >> 48);
    }
    return total;
  }

  void compare() {
    if (num_waiting_ == 0) return;
    for (int64_t row = 0; row < rows_; ++row) {
      const uint64_t* bits = row_bits_.data() + row * kWords;
      for (int64_t col = 0; col < cols_; ++col) {
        counts_[row * cols_ + col] += common(bits, col_bits_.data() + col * kWords);
      }
    }
    std::fill(row_bits_.begin(), row_bits_.end(), 0);
    std::fill(col_bits_.begin(), col_bits_.end(), 0);
    num_waiting_ = 0;
  }

  const int64_t rows_, cols_;
  int64_t num_waiting_ = 0;
  std::vector<int32_t> counts_;
  std::vector<uint64_t> row_bits_, col_bits_;
};

// Both phases of algorithm 4. A batch is a set of chunks, one of each rank, that run together; batch_ has the batch of
// every chunk.
template <class Index>
class Reorder {
 public:
  Reorder(const int64_t* starts, const Index* members, int64_t num_vertices, int64_t num_ranks, int64_t num_chunks,
          int num_threads)
      : starts_(starts),
        members_(members),
        num_vertices_(num_vertices),
        num_ranks_(num_ranks),
        num_chunks_(num_chunks),
        num_threads_(static_cast<int>(std::clamp<int64_t>(kMaxCounts / (num_chunks * num_chunks), 1, num_threads))),
        batch_(num_ranks * num_chunks),
        chunk_(num_ranks * num_chunks) {}

  void run(int64_t* orders) {
    for (int64_t rank = 0; rank < num_ranks_; ++rank) place(rank);
    const std::vector<int64_t> sequence = order_batches();
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      for (int64_t j = 0; j < num_chunks_; ++j) *orders++ = chunk_[rank * num_chunks_ + sequence[j]];
    }
  }

 private:
  static constexpr int64_t kMaxCounts = int64_t{1} << 27;  // counts of all threads together, num_chunks^2 for each

  // Phase 1: adds to every batch the chunk of this rank with the most vertices in common. A batch gets only one chunk
  // of each rank, so all overlaps can be counted before.
  void place(int64_t rank) {
    const int64_t first = rank * num_chunks_;
    Overlaps overlaps = rank == 0 ? Overlaps(0, 0) : count(first, first, first + num_chunks_);
    std::vector<bool> used(num_chunks_);
    for (int64_t batch = 0; batch < num_chunks_; ++batch) {
      const int64_t chunk = rank == 0 ? batch : best(overlaps.row(batch), used);
      used[chunk] = true;
      chunk_[first + batch] = chunk;
      batch_[first + chunk] = batch;
    }
  }

  // Phase 2: orders the batches. After batch 0, the next one is always that with the most vertices in common with the
  // last.
  std::vector<int64_t> order_batches() {
    std::vector<int64_t> sequence{0};
    std::vector<bool> used(num_chunks_);
    const Overlaps overlaps = count(num_ranks_ * num_chunks_, 0, 0);
    used[0] = true;
    while (static_cast<int64_t>(sequence.size()) < num_chunks_) {
      sequence.push_back(best(overlaps.row(sequence.back()), used));
      used[sequence.back()] = true;
    }
    return sequence;
  }

  int64_t best(const int32_t* counts, const std::vector<bool>& used) const {
    int64_t best = -1;
    for (int64_t i = 0; i < num_chunks_; ++i) {
      if (!used[i] && (best < 0 || counts[i] > counts[best])) best = i;
    }
    return best;
  }

  // Counts the vertices that the batches of the chunks below `placed` have in common with the chunks in [first, last),
  // or with each other if that range is empty.
  Overlaps count(int64_t placed, int64_t first, int64_t last) const {
    Overlaps total(num_chunks_, num_chunks_);
#pragma omp parallel num_threads(num_threads_)
    {
      Overlaps overlaps(num_chunks_, num_chunks_);
      std::vector<int64_t> batches, chunks, seen(num_chunks_, -1);
#pragma omp for schedule(static)
      for (int64_t vertex = 0; vertex < num_vertices_; ++vertex) {
        batches.clear();
        chunks.clear();
        const int64_t end = starts_[vertex + 1];
        int64_t i = starts_[vertex];
        for (; i < end && members_[i] < placed; ++i) {
          const int64_t batch = batch_[members_[i]];
          if (seen[batch] != vertex) batches.push_back(batch);
          seen[batch] = vertex;
        }
        for (; i < end && members_[i] < last; ++i) chunks.push_back(members_[i] - first);
        overlaps.add(batches, first == last ? batches : chunks);
      }
#pragma omp critical
      total.merge(overlaps);
    }
    return total;
  }

  const int64_t* starts_;
  const Index* members_;
  const int64_t num_vertices_, num_ranks_, num_chunks_;
  const int num_threads_;
  std::vector<int64_t> batch_, chunk_;  // the batch of each chunk; the chunk of each rank and batch
};

}  // namespace

template <class Index>
void reorder_chunks(const int64_t* starts, const Index* members, int64_t num_vertices, int64_t num_ranks,
                    int64_t num_chunks, int64_t* orders, int num_threads) {
  if (num_ranks == 0 || num_chunks == 0) return;
  Reorder<Index>(starts, members, num_vertices, num_ranks, num_chunks, num_threads).run(orders);
}

template void reorder_chunks(const int64_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t*, int);
template void reorder_chunks(const int64_t*, const int64_t*, int64_t, int64_t, int64_t, int64_t*, int);

}  // namespace weft
