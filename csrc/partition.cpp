#include "partition.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace weft {
namespace {

// Price of a remote vertex, in cut edges. Remote vertices are the rows to send, while a cut edge only makes one more
// likely. Cut edges count as well, since they show the direction when no single move changes the remote vertices.
constexpr double kRemoteWeight = 1.0;

// First price of a load outside of its slack, in cut edges per in-edge too many or too few, and the factor by which it
// grows after every pass that leaves the load outside. Small values let the vertices that cost least move first. Values
// from 0.02 to 0.5 and from 1.25 to 2 were compared on web, social, author and R-MAT graphs.
constexpr double kFirstPrice = 0.1, kGrowth = 1.25;

// A pass whose gain is a smaller fraction of the cut is the last one of its stage.
constexpr double kLeastGain = 1e-3;

// The range around the mean in which a load costs nothing. Outside, its cost is linear in the distance from the range.
struct Band {
  double mean = 0, over = 0, price = 0;

  Band() = default;
  Band(const int64_t* loads, int64_t num_parts, double slack, double total_price) {
    for (int64_t p = 0; p < num_parts; ++p) mean += static_cast<double>(loads[p]);
    mean /= static_cast<double>(num_parts);
    over = slack * mean;
    price = total_price / std::max(mean, 1.0);
  }

  double cost(int64_t load) const { return price * std::max(0.0, std::abs(static_cast<double>(load) - mean) - over); }
  double change(int64_t load, int64_t by) const { return cost(load + by) - cost(load); }
};

template <class Index>
class Refiner {
 public:
  Refiner(const int64_t* indptr, const Index* indices, int64_t num_vertices, int64_t num_parts, int32_t* part,
          int64_t* counts)
      : indptr_(indptr),
        indices_(indices),
        num_vertices_(num_vertices),
        num_parts_(num_parts),
        part_(part),
        counts_(counts),
        links_(static_cast<size_t>(num_vertices) * num_parts),
        near_(num_parts),
        joins_(num_parts) {
    std::fill_n(counts, kNumCounts * num_parts, 0);
    for (int64_t v = 0; v < num_vertices; ++v) {
      ++load(kVertices, part[v]);
      load(kInEdges, part[v]) += indptr[v + 1] - indptr[v];
      for (int64_t entry = indptr[v]; entry < indptr[v + 1]; ++entry) {
        ++links(indices[entry])[part[v]];
        cut_ += part[indices[entry]] != part[v];
      }
    }
    for (int64_t u = 0; u < num_vertices; ++u) {
      for (int64_t p = 0; p < num_parts; ++p) load(kRemote, p) += p != part[u] && links(u)[p] > 0;
    }
  }

  // Stage 1 does not limit the remote vertices. Stage 2 continues with the prices of stage 1 and balances them as well.
  int64_t run(const int64_t* order, const Slack& slack, int64_t max_passes) {
    const double no_limit = static_cast<double>(num_parts_);
    for (const Slack& now : {Slack{slack.vertices, slack.in_edges, no_limit}, slack}) {
      for (int64_t pass = 0; pass < max_passes; ++pass) {
        set_bands(now);
        double gain = 0;
        for (int64_t i = 0; i < num_vertices_; ++i) gain += improve(order[i]);
        set_bands(now);  // the mean of the remote vertices has moved
        if (within_slack() && gain <= kLeastGain * static_cast<double>(cut_)) break;
      }
    }
    return cut_;
  }

 private:
  int64_t& load(Count count, int64_t p) { return counts_[count * num_parts_ + p]; }

  // Number of edges from vertex u into each part.
  int32_t* links(int64_t u) { return links_.data() + u * num_parts_; }

  void set_bands(const Slack& slack) {
    const double slacks[] = {slack.vertices, slack.in_edges, slack.remote};
    const double edges_a_part = static_cast<double>(indptr_[num_vertices_]) / static_cast<double>(num_parts_);
    for (int count = 0; count < kNumCounts; ++count) {
      bands_[count] = Band(counts_ + count * num_parts_, num_parts_, slacks[count], prices_[count] * edges_a_part);
    }
  }

  // Returns whether all loads are within their slack; raises the price of each kind of load that is not.
  bool within_slack() {
    bool all = true;
    for (int count = 0; count < kNumCounts; ++count) {
      const int64_t* loads = counts_ + count * num_parts_;
      const Band& band = bands_[count];
      if (std::all_of(loads, loads + num_parts_, [&](int64_t load) { return band.cost(load) == 0; })) continue;
      prices_[count] *= kGrowth;
      all = false;
    }
    return all;
  }

  // Calls visit(u, number of edges u -> v) for each distinct in-neighbour; parallel edges are next to each other.
  template <class Visit>
  void for_sources(int64_t v, Visit visit) {
    for (int64_t entry = indptr_[v]; entry < indptr_[v + 1];) {
      const int64_t first = entry;
      while (++entry < indptr_[v + 1] && indices_[entry] == indices_[first]) continue;
      visit(static_cast<int64_t>(indices_[first]), static_cast<int32_t>(entry - first));
    }
  }

  // Computes what would change if v moved to part p: the near_[p] edges between v and p would not be cut any more,
  // while the near_[home] edges to its current part would; joins_[p] more vertices would be remote for p, and leaves_
  // fewer for its current part.
  void look(int64_t v) {
    const int32_t home = part_[v];
    const int32_t* own = links(v);
    for (int64_t p = 0; p < num_parts_; ++p) {
      near_[p] = own[p];
      joins_[p] = -(own[p] > 0);  // v itself
    }
    int64_t num_loops = 0;
    leaves_ = 0;
    for_sources(v, [&](int64_t u, int32_t num_edges) {
      if (u == v) {
        num_loops = num_edges;
        return;
      }
      const int32_t* link = links(u);
      const int32_t there = part_[u];
      near_[there] += num_edges;
      leaves_ += there != home && link[home] == num_edges;
      for (int64_t p = 0; p < num_parts_; ++p) joins_[p] += link[p] == 0;
      joins_[there] -= link[there] == 0;
    });
    near_[home] -= num_loops;
    leaves_ -= own[home] > num_loops;
  }

  // Moves v to the part where it costs least. Returns the gain; 0 if v stays.
  double improve(int64_t v) {
    look(v);
    const int32_t home = part_[v];
    const int64_t degree = indptr_[v + 1] - indptr_[v];
    // Cost of leaving: edges that become cut, minus vertices that are not remote any more, plus the changes of the
    // loads.
    const double leaving = static_cast<double>(near_[home]) - kRemoteWeight * static_cast<double>(leaves_) +
                           bands_[kVertices].change(load(kVertices, home), -1) +
                           bands_[kInEdges].change(load(kInEdges, home), -degree) +
                           bands_[kRemote].change(load(kRemote, home), -leaves_);
    double least = 0;
    int32_t best = home;
    for (int32_t p = 0; p < num_parts_; ++p) {
      if (p == home) continue;
      const double cost = leaving - static_cast<double>(near_[p]) + kRemoteWeight * static_cast<double>(joins_[p]) +
                          bands_[kVertices].change(load(kVertices, p), 1) +
                          bands_[kInEdges].change(load(kInEdges, p), degree) +
                          bands_[kRemote].change(load(kRemote, p), joins_[p]);
      if (cost < least) {
        least = cost;
        best = p;
      }
    }
    if (best != home) move(v, best);
    return -least;
  }

  // Moves v, for which look() was called last, and updates all counts in O(in-degree).
  void move(int64_t v, int32_t to) {
    const int32_t home = part_[v];
    const int64_t degree = indptr_[v + 1] - indptr_[v];
    for (int64_t entry = indptr_[v]; entry < indptr_[v + 1]; ++entry) {
      int32_t* link = links(indices_[entry]);
      --link[home];
      ++link[to];
    }
    --load(kVertices, home);
    ++load(kVertices, to);
    load(kInEdges, home) -= degree;
    load(kInEdges, to) += degree;
    load(kRemote, home) -= leaves_;
    load(kRemote, to) += joins_[to];
    cut_ += near_[home] - near_[to];
    part_[v] = to;
  }

  const int64_t* indptr_;
  const Index* indices_;
  const int64_t num_vertices_, num_parts_;
  int32_t* part_;
  int64_t* counts_;
  int64_t cut_ = 0;
  std::vector<int32_t> links_;
  Band bands_[kNumCounts];
  double prices_[kNumCounts] = {kFirstPrice, kFirstPrice, kFirstPrice};
  std::vector<int64_t> near_, joins_;
  int64_t leaves_ = 0;
};

}  // namespace

template <class Index>
int64_t count_parts(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int32_t* part,
                    int64_t num_parts, int64_t* counts, int num_threads) {
  std::vector<uint8_t> needed(static_cast<size_t>(num_vertices) * num_parts);  // whether part p has an edge from u
  std::fill_n(counts, kNumCounts * num_parts, 0);
  int64_t cut = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : cut)
  {
    std::vector<int64_t> own(kNumCounts * num_parts);
#pragma omp for schedule(dynamic, 1024)
    for (int64_t v = 0; v < num_vertices; ++v) {
      const int32_t p = part[v];
      ++own[kVertices * num_parts + p];
      own[kInEdges * num_parts + p] += indptr[v + 1] - indptr[v];
      for (int64_t entry = indptr[v]; entry < indptr[v + 1]; ++entry) {
        const int64_t u = indices[entry];
        cut += part[u] != p;
#pragma omp atomic write
        needed[u * num_parts + p] = 1;
      }
    }
#pragma omp for schedule(static)
    for (int64_t u = 0; u < num_vertices; ++u) {
      for (int64_t p = 0; p < num_parts; ++p) {
        own[kRemote * num_parts + p] += p != part[u] && needed[u * num_parts + p];
      }
    }
#pragma omp critical
    for (int64_t i = 0; i < kNumCounts * num_parts; ++i) counts[i] += own[i];
  }
  return cut;
}

template <class Index>
void fennel(const int64_t* indptr, const Index* indices, const int64_t* indptr_t, const Index* indices_t,
            int64_t num_vertices, const int64_t* order, int64_t num_parts, int64_t most, int32_t* part) {
  const double n = static_cast<double>(num_vertices), e = static_cast<double>(indptr[num_vertices]);
  const double weight = 1.5 * std::sqrt(static_cast<double>(num_parts)) * e / (n * std::sqrt(n));
  std::vector<int64_t> size(num_parts), near(num_parts);
  std::fill_n(part, num_vertices, -1);
  for (int64_t i = 0; i < num_vertices; ++i) {
    const int64_t v = order[i];
    std::fill(near.begin(), near.end(), 0);
    const auto meet = [&](int64_t u) {
      if (part[u] >= 0) ++near[part[u]];
    };
    for (int64_t entry = indptr[v]; entry < indptr[v + 1]; ++entry) meet(indices[entry]);
    for (int64_t entry = indptr_t[v]; entry < indptr_t[v + 1]; ++entry) meet(indices_t[entry]);
    int64_t best = -1;
    double most_gain = 0;
    for (int64_t p = 0; p < num_parts; ++p) {
      if (size[p] >= most) continue;
      const double gain = static_cast<double>(near[p]) - weight * std::sqrt(static_cast<double>(size[p]));
      if (best < 0 || gain > most_gain || (gain == most_gain && size[p] < size[best])) {
        most_gain = gain;
        best = p;
      }
    }
    part[v] = static_cast<int32_t>(best);
    ++size[best];
  }
}

template <class Index>
int64_t refine(const int64_t* indptr, const Index* indices, int64_t num_vertices, const int64_t* order,
               int64_t num_parts, const Slack& slack, int64_t max_passes, int32_t* part, int64_t* counts) {
  return Refiner<Index>(indptr, indices, num_vertices, num_parts, part, counts).run(order, slack, max_passes);
}

#define WEFT_INSTANTIATE(Index)                                                                                     \
  template int64_t count_parts(const int64_t*, const Index*, int64_t, const int32_t*, int64_t, int64_t*, int);      \
  template void fennel(const int64_t*, const Index*, const int64_t*, const Index*, int64_t, const int64_t*, int64_t, \
                       int64_t, int32_t*);                                                                          \
  template int64_t refine(const int64_t*, const Index*, int64_t, const int64_t*, int64_t, const Slack&, int64_t,    \
                          int32_t*, int64_t*);
WEFT_INSTANTIATE(int32_t)
WEFT_INSTANTIATE(int64_t)

}  // namespace weft
