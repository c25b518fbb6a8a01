#include "dependencies.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace weft {
namespace {

constexpr int8_t kNone = -1;

template <class Index>
class Chooser {
 public:
  Chooser(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part, int32_t own,
          const int64_t* wanted, int64_t num_wanted, const Caching& caching, int8_t* levels, int num_threads)
      : indptr_(indptr),
        indices_(indices),
        num_vertices_(num_vertices),
        part_(part),
        own_(own),
        wanted_(wanted, wanted + num_wanted),
        caching_(caching),
        levels_(levels),
        num_threads_(num_threads),
        is_wanted_(num_vertices) {
    std::fill_n(levels, num_vertices, kNone);
    for (const int64_t u : wanted_) is_wanted_[u] = 1;
  }

  Cached run() {
    for (int64_t level = caching_.first; level < caching_.num_levels; ++level) {
      if (!choose(static_cast<int8_t>(level))) return {bytes_, true};
    }
    return {bytes_, false};
  }

 private:
  // The changes to cache one vertex: vertices whose level rises, and the cost.
  struct Addition {
    explicit Addition(int64_t num_vertices) : levels(num_vertices, kNone) {}

    std::vector<int8_t> levels;
    std::vector<int64_t> raised;
    double seconds = 0, bytes = 0, limit = 0;

    void clear() {
      for (const int64_t v : raised) levels[v] = kNone;
      raised.clear();
      seconds = bytes = 0;
    }
  };

  double cost(int64_t level, LevelCost kind) const { return caching_.costs[level * kNumLevelCosts + kind]; }

  // Decides one level. Returns false if the memory limit is reached.
  bool choose(int8_t level) {
    const bool forced = caching_.ratio >= 0;
    const double limit = forced ? std::numeric_limits<double>::infinity() : cost(level, kFetchSeconds);
    int64_t left = forced ? static_cast<int64_t>(caching_.ratio * static_cast<double>(wanted_.size()) + 0.5)
                          : static_cast<int64_t>(wanted_.size());
    if (left == 0) return true;
    const std::vector<int64_t> queue = ordered(level, limit, left);
    Addition addition(num_vertices_);
    for (const int64_t u : queue) {
      if (left == 0) break;
      measure(u, level, limit, &addition);
      if (addition.seconds >= limit) continue;
      if (caching_.max_bytes >= 0 && bytes_ + addition.bytes > caching_.max_bytes) return false;
      bytes_ += addition.bytes;
      for (const int64_t v : addition.raised) levels_[v] = addition.levels[v];
      --left;
    }
    return true;
  }

  // The wanted vertices, the cheapest first. Those that cost the limit or more come last, in their first order: they
  // may become cheaper when other vertices are cached.
  std::vector<int64_t> ordered(int8_t level, double limit, int64_t left) const {
    const int64_t count = static_cast<int64_t>(wanted_.size());
    if (caching_.ratio >= 0 && left == count && caching_.max_bytes < 0) return wanted_;  // all are cached, in any order
    std::vector<double> seconds(count);
#pragma omp parallel num_threads(num_threads_)
    {
      Addition addition(num_vertices_);
#pragma omp for schedule(dynamic, 64)
      for (int64_t i = 0; i < count; ++i) {
        measure(wanted_[i], level, limit, &addition);
        seconds[i] = std::min(addition.seconds, limit);
      }
    }
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return seconds[a] < seconds[b]; });
    for (int64_t& i : order) i = wanted_[i];
    return order;
  }

  // Computes the changes to cache u up to `level`; stops early if they cost the limit.
  void measure(int64_t u, int8_t level, double limit, Addition* addition) const {
    addition->clear();
    addition->limit = limit;
    raise(u, level, true, addition);
  }

  // Raises the level of v, and recursively that of its sources to one level less. is_root: v is the vertex to cache,
  // whose fetch is not subtracted from the cost of its highest level.
  void raise(int64_t v, int8_t level, bool is_root, Addition* addition) const {
    const int8_t before = std::max(levels_[v], addition->levels[v]);
    if (before >= level || part_[v] == own_ || addition->seconds >= addition->limit) return;
    const double degree = static_cast<double>(indptr_[v + 1] - indptr_[v]);
    for (int64_t k = std::max<int64_t>(before + 1, caching_.first); k <= level; ++k) {
      const double seconds = cost(k, kRowSeconds) + degree * cost(k, kEdgeSeconds);
      const bool spares_fetch = is_wanted_[v] && !(is_root && k == level);
      addition->seconds += spares_fetch ? std::max(0.0, seconds - cost(k, kFetchSeconds)) : seconds;
      addition->bytes += cost(k, kRowBytes) + degree * cost(k, kEdgeBytes);
    }
    if (addition->levels[v] == kNone) addition->raised.push_back(v);
    addition->levels[v] = level;
    if (level <= caching_.first) return;
    for (int64_t entry = indptr_[v]; entry < indptr_[v + 1]; ++entry) {
      raise(indices_[entry], static_cast<int8_t>(level - 1), false, addition);
    }
  }

  const int64_t* indptr_;
  const Index* indices_;
  const int64_t num_vertices_;
  const int32_t* part_;
  const int32_t own_;
  const std::vector<int64_t> wanted_;
  const Caching caching_;
  int8_t* levels_;
  const int num_threads_;
  std::vector<uint8_t> is_wanted_;
  double bytes_ = 0;
};

}  // namespace

template <class Index>
Cached cache_levels(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part, int32_t own,
                    const int64_t* wanted, int64_t num_wanted, const Caching& caching, int8_t* levels, int num_threads) {
  return Chooser<Index>(indptr, indices, num_vertices, part, own, wanted, num_wanted, caching, levels, num_threads).run();
}

template <class Index>
int64_t gather_block(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part,
                     const int64_t* inputs, int64_t num_inputs, int64_t num_targets, Index* positions,
                     int64_t* fetched) {
  std::vector<Index> position(num_vertices, -1);
  for (int64_t i = 0; i < num_inputs; ++i) position[inputs[i]] = static_cast<Index>(i);
  int64_t num_fetched = 0;
  const auto for_entries = [&](auto visit) {
    for (int64_t row = 0; row < num_targets; ++row) {
      for (int64_t entry = indptr[inputs[row]]; entry < indptr[inputs[row] + 1]; ++entry) visit(indices[entry]);
    }
  };
  for_entries([&](Index source) {
    if (position[source] >= 0) return;
    position[source] = static_cast<Index>(num_inputs);  // marks it as seen; its position follows when all are known
    fetched[num_fetched++] = source;
  });
  std::sort(fetched, fetched + num_fetched,
            [&](int64_t a, int64_t b) { return part[a] != part[b] ? part[a] < part[b] : a < b; });
  if (positions == nullptr) return num_fetched;
  for (int64_t i = 0; i < num_fetched; ++i) position[fetched[i]] = static_cast<Index>(num_inputs + i);
  for_entries([&](Index source) { *positions++ = position[source]; });
  return num_fetched;
}

#define WEFT_INSTANTIATE(Index)                                                                                         \
  template Cached cache_levels(const int64_t*, const Index*, int64_t, const int32_t*, int32_t, const int64_t*, int64_t, \
                               const Caching&, int8_t*, int);                                                           \
  template int64_t gather_block(const int64_t*, const Index*, int64_t, const int32_t*, const int64_t*, int64_t,         \
                                int64_t, Index*, int64_t*);
WEFT_INSTANTIATE(int32_t)
WEFT_INSTANTIATE(int64_t)

}  // namespace weft
