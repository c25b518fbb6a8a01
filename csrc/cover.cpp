#include "cover.h"

#include <algorithm>
#include <vector>

namespace weft {
namespace {

constexpr int kNone = -1;

// The edges from the sources of other parts, grouped by source.
template <class Index>
struct OutEdges {
  OutEdges(const int64_t* indptr, const Index* indices, int64_t num_targets, int64_t first, int64_t num_sources)
      : starts(num_sources + 1) {
    for (int64_t entry = 0; entry < indptr[num_targets]; ++entry) {
      if (indices[entry] >= first) ++starts[indices[entry] - first + 1];
    }
    for (int64_t u = 0; u < num_sources; ++u) starts[u + 1] += starts[u];
    targets.resize(starts[num_sources]);
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t v = 0; v < num_targets; ++v) {
      for (int64_t entry = indptr[v]; entry < indptr[v + 1]; ++entry) {
        if (indices[entry] >= first) targets[next[indices[entry] - first]++] = static_cast<Index>(v);
      }
    }
  }

  std::vector<int64_t> starts;
  std::vector<Index> targets;
};

// The minimum vertex cover of one part's edges, from a maximum matching of its sources with targets (Hopcroft and Karp
// 1973):
//
// 1. Match greedily.
// 2. Find the depth of every source on alternating paths from the free sources, up to the nearest free target (layer).
// 3. Match along disjoint shortest augmenting paths (augment), and go back to 2 until there is none.
// 4. Koenig: sources that a free source reaches are covered by their targets, all others by their rows.
template <class Index>
class Matching {
 public:
  explicit Matching(int64_t num_targets) : mate_of_target_(num_targets, kNone) {}

  void cover(const OutEdges<Index>& edges, int64_t begin, int64_t end, uint8_t* taken) {
    edges_ = &edges, begin_ = begin, count_ = static_cast<Index>(end - begin);
    mate_.assign(count_, kNone);
    next_.resize(count_);
    match_greedily();
    while (layer()) {
      for (Index u = 0; u < count_; ++u) next_[u] = start(u);
      for (Index u = 0; u < count_; ++u) {
        if (mate_[u] == kNone) augment(u);
      }
    }
    // Free sources reach no free target now. Edges of the sources that they reach are covered by targets; the other
    // sources are in the cover.
    for (Index u = 0; u < count_; ++u) taken[begin + u] = depth_[u] == kNone;
    for (const Index v : mate_) {
      if (v != kNone) mate_of_target_[v] = kNone;
    }
  }

 private:
  int64_t start(Index u) const { return edges_->starts[begin_ + u]; }
  int64_t end(Index u) const { return edges_->starts[begin_ + u + 1]; }

  void match(Index u, Index v) {
    mate_[u] = v;
    mate_of_target_[v] = u;
  }

  void match_greedily() {
    for (Index u = 0; u < count_; ++u) {
      for (int64_t entry = start(u); entry < end(u) && mate_[u] == kNone; ++entry) {
        if (const Index v = edges_->targets[entry]; mate_of_target_[v] == kNone) match(u, v);
      }
    }
  }

  // Computes the depths of sources on alternating paths from the free sources, up to the nearest free target. Returns
  // whether there is one.
  bool layer() {
    depth_.assign(count_, kNone);
    queue_.clear();
    for (Index u = 0; u < count_; ++u) {
      if (mate_[u] == kNone) depth_[u] = 0, queue_.push_back(u);
    }
    nearest_ = kNone;
    for (size_t head = 0; head < queue_.size(); ++head) {
      const Index u = queue_[head];
      if (nearest_ != kNone && depth_[u] >= nearest_) break;
      for (int64_t entry = start(u); entry < end(u); ++entry) {
        const Index after = mate_of_target_[edges_->targets[entry]];
        if (after == kNone) {
          nearest_ = depth_[u] + 1;
        } else if (depth_[after] == kNone) {
          depth_[after] = depth_[u] + 1, queue_.push_back(after);
        }
      }
    }
    return nearest_ != kNone;
  }

  // Searches for a shortest alternating path from a free source to a free target, and matches along it.
  void augment(Index root) {
    path_.assign(1, root);
    while (!path_.empty()) {
      const Index u = path_.back();
      if (next_[u] == end(u)) {
        path_.pop_back();
        if (!path_.empty()) ++next_[path_.back()];
        continue;
      }
      const Index after = mate_of_target_[edges_->targets[next_[u]]];
      if (after == kNone && depth_[u] + 1 == nearest_) {
        for (const Index w : path_) match(w, edges_->targets[next_[w]++]);
        return;
      }
      if (after != kNone && depth_[after] == depth_[u] + 1 && depth_[after] < nearest_) {
        path_.push_back(after);
      } else {
        ++next_[u];
      }
    }
  }

  const OutEdges<Index>* edges_ = nullptr;
  int64_t begin_ = 0;
  Index count_ = 0, nearest_ = kNone;
  std::vector<Index> mate_, mate_of_target_, depth_, queue_, path_;
  std::vector<int64_t> next_;
};

}  // namespace

template <class Index>
void least_cover(const int64_t* indptr, const Index* indices, int64_t num_targets, int64_t first, const int64_t* bounds,
                 int64_t num_parts, uint8_t* taken, int num_threads) {
  const OutEdges<Index> edges(indptr, indices, num_targets, first, bounds[num_parts]);
#pragma omp parallel num_threads(num_threads)
  {
    Matching<Index> matching(num_targets);
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < num_parts; ++part) {
      if (bounds[part] < bounds[part + 1]) matching.cover(edges, bounds[part], bounds[part + 1], taken);
    }
  }
}

template void least_cover(const int64_t*, const int32_t*, int64_t, int64_t, const int64_t*, int64_t, uint8_t*, int);
template void least_cover(const int64_t*, const int64_t*, int64_t, int64_t, const int64_t*, int64_t, uint8_t*, int);

}  // namespace weft
