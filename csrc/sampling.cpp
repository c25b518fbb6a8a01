#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "subset.h"

namespace weft {
namespace {

constexpr int64_t kChunk = 16;    // rows whose sources are prefetched together
constexpr int64_t kAhead = 32;    // distance of prefetched row pointers, in targets
constexpr double kPi = 3.141592653589793;

double unit(uint64_t word) { return static_cast<double>(word >> 11) * 0x1p-53; }  // in [0, 1)

double normal(uint64_t word) {  // a normal random number (Box and Muller 1958); 1 - unit is above 0
  return std::sqrt(-2.0 * std::log(1.0 - unit(mix_word(word)))) * std::cos(2 * kPi * unit(mix_word(word ^ 1)));
}

// Samples the rows of one thread, one after the other.
template <class Index>
class Drawer {
 public:
  explicit Drawer(const Sampling<Index>& a)
      : a_(a),
        typed_(a.type16 != nullptr || a.type32 != nullptr),
        starts_(typed_ ? a.num_relations + 1 : 0),
        near_(std::cos(kPi / 2 * a.turn)),
        far_(std::sin(kPi / 2 * a.turn)) {}

  bool failed() const { return failed_; }

  // Calls visit(position in the row, 1 / probability) for each sampled edge, with ascending positions.
  template <class Visit>
  void draw(const SampledRow& row, Visit visit) {
    const int64_t degree = row.end - row.begin;
    if (!typed_) return draw_group(row, degree, a_.fanouts[0], row.word, [](int64_t i) { return i; }, visit);
    group(row);
    drawn_.clear();
    for (int64_t relation = 0; relation < a_.num_relations; ++relation) {
      const int64_t* places = places_.data() + starts_[relation];
      const uint64_t word = mix_word(row.word ^ static_cast<uint64_t>(relation));
      draw_group(row, starts_[relation + 1] - starts_[relation], a_.fanouts[relation], word,
                 [places](int64_t i) { return places[i]; },
                 [&](int64_t place, double scale) { drawn_.emplace_back(place, scale); });
    }
    std::sort(drawn_.begin(), drawn_.end());
    for (const auto& [place, scale] : drawn_) visit(place, scale);
  }

  int64_t count(const SampledRow& row) {
    const int64_t degree = row.end - row.begin, fanout = a_.fanouts[0];
    if (!typed_ && (fanout == kAllEdges || degree <= fanout)) return degree;
    if (!typed_ && a_.method == Method::kUniform) return fanout;
    int64_t result = 0;
    draw(row, [&](int64_t, double) { ++result; });
    return result;
  }

 private:
  int64_t relation(int64_t edge) const { return a_.type16 != nullptr ? a_.type16[edge] : a_.type32[edge]; }

  double weight(int64_t edge) const { return a_.weight32 != nullptr ? a_.weight32[edge] : a_.weight64[edge]; }

  uint64_t id(Index vertex) const { return static_cast<uint64_t>(a_.ids != nullptr ? a_.ids[vertex] : vertex); }

  // Groups the positions of a row by relation: places_ from starts_[relation] on.
  void group(const SampledRow& row) {
    std::fill(starts_.begin(), starts_.end(), 0);
    places_.resize(row.end - row.begin);
    for (int64_t edge = row.begin; edge < row.end; ++edge) {
      const int64_t kind = relation(edge);
      if (kind < 0 || kind >= a_.num_relations) {
        failed_ = true;
        std::fill(starts_.begin(), starts_.end(), 0);
        return;
      }
      ++starts_[kind + 1];
    }
    for (int64_t kind = 0; kind < a_.num_relations; ++kind) starts_[kind + 1] += starts_[kind];
    for (int64_t edge = row.begin; edge < row.end; ++edge) places_[starts_[relation(edge)]++] = edge - row.begin;
    for (int64_t kind = a_.num_relations; kind > 0; --kind) starts_[kind] = starts_[kind - 1];
    starts_[0] = 0;
  }

  // Samples k of `degree` edges of a row; the i-th of them is at position place(i).
  template <class Place, class Visit>
  void draw_group(const SampledRow& row, int64_t degree, int64_t k, uint64_t word, Place place, Visit visit) {
    if (k == kAllEdges || degree <= k) {
      for (int64_t i = 0; i < degree; ++i) visit(place(i), 1.0);
    } else if (k > 0 && a_.method == Method::kWeighted) {
      draw_weighted(row, degree, k, place, visit);
    } else if (k > 0) {
      const double scale = static_cast<double>(degree) / static_cast<double>(k);
      const auto take = [&](int64_t i) { visit(place(i), scale); };
      if (a_.method == Method::kUniform) {
        subset_.draw(degree, k, word, take);
      } else {
        draw_labor(row, degree, k, place, take);
      }
    }
  }

  template <class Place, class Take>
  void draw_labor(const SampledRow& row, int64_t degree, int64_t k, Place place, Take take) const {
    const Index* sources = a_.indices + row.begin;
    if (a_.turn < 0) {
      __extension__ using Wide = unsigned __int128;
      const auto limit = static_cast<uint64_t>((static_cast<Wide>(k) << 64) / static_cast<Wide>(degree));
      for (int64_t i = 0; i < degree; ++i) {
        if (mix_word(a_.key ^ id(sources[place(i)])) < limit) take(i);
      }
      return;
    }
    const double limit = static_cast<double>(k) / static_cast<double>(degree);
    for (int64_t i = 0; i < degree; ++i) {
      if (variate(id(sources[place(i)])) < limit) take(i);
    }
  }

  // Phi (the normal distribution function) of a normal number that changes gradually from that of key to that of
  // next_key.
  double variate(uint64_t id) const {
    const double z = near_ * normal(mix_word(a_.key ^ id)) + far_ * normal(mix_word(a_.next_key ^ id));
    return 0.5 * std::erfc(-z / std::sqrt(2.0));
  }

  template <class Place, class Visit>
  void draw_weighted(const SampledRow& row, int64_t degree, int64_t k, Place place, Visit visit) {
    const double rate = poisson_rate(row, degree, k, place);
    for (int64_t i = 0; i < degree; ++i) {
      const int64_t at = place(i);
      const double w = weight(row.begin + at);
      if (!(w > 0)) continue;
      const double probability = std::min(1.0, rate * w);
      if (unit(mix_word(row.word ^ static_cast<uint64_t>(at))) < probability) visit(at, 1.0 / probability);
    }
  }

  // Returns c for which the sum of min(1, c w) is k. Repeats with the weights for which c w < 1, until no further one
  // reaches 1. Returns infinity if no more than k weights are above 0.
  template <class Place>
  double poisson_rate(const SampledRow& row, int64_t degree, int64_t k, Place place) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    int64_t num_positive = 0, num_certain = 0;
    double rate = 0, total = 0;
    for (int64_t i = 0; i < degree; ++i) {
      const double w = weight(row.begin + place(i));
      failed_ = failed_ || !(w >= 0 && w < kInfinity);
      num_positive += w > 0;
      total += w;
    }
    if (num_positive <= k) return kInfinity;
    while (true) {
      rate = static_cast<double>(k - num_certain) / total;
      int64_t certain = 0;
      double rest = 0;
      for (int64_t i = 0; i < degree; ++i) {
        const double w = weight(row.begin + place(i));
        certain += rate * w >= 1;
        rest += rate * w >= 1 ? 0 : w;
      }
      if (certain <= num_certain || certain >= k) return rate;
      num_certain = certain;
      total = rest;
    }
  }

  const Sampling<Index>& a_;
  const bool typed_;
  bool failed_ = false;
  std::vector<int64_t> starts_, places_;
  const double near_, far_;
  std::vector<std::pair<int64_t, double>> drawn_;
  Subset subset_;
};

}  // namespace

template <class Index>
void count_sample(const Sampling<Index>& a, const int64_t* targets, int64_t num_targets, int64_t num_vertices,
                  SampledRow* rows, int64_t* block, double* row_scale, int num_threads) {
  bool in_range = true, sound = true;
  block[0] = 0;
#pragma omp parallel num_threads(num_threads) reduction(&& : in_range, sound)
  {
    Drawer<Index> drawer(a);
#pragma omp for schedule(dynamic, 1024)
    for (int64_t i = 0; i < num_targets; ++i) {
      if (i + kAhead < num_targets) {  // prefetching an invalid address is harmless
        __builtin_prefetch(a.indptr + targets[i + kAhead]);
        if (a.ids != nullptr) __builtin_prefetch(a.ids + targets[i + kAhead]);
      }
      const int64_t target = targets[i];
      if (target < 0 || target >= num_vertices) {
        in_range = false;
        continue;
      }
      const auto id = static_cast<uint64_t>(a.ids != nullptr ? a.ids[target] : target);
      rows[i] = {a.indptr[target], a.indptr[target + 1], mix_word(a.key ^ id)};
      block[i + 1] = drawer.count(rows[i]);
      if (row_scale != nullptr) {
        const auto degree = static_cast<double>(rows[i].end - rows[i].begin);
        row_scale[i] = a.fanouts[0] <= 0 ? 1.0 : std::max(1.0, degree / static_cast<double>(a.fanouts[0]));
      }
    }
    sound = sound && !drawer.failed();
  }
  if (!in_range) throw std::invalid_argument("a target is not a vertex of the graph");
  if (!sound) throw std::invalid_argument("weights must be finite and not negative, and each relation needs a fanout");
  for (int64_t i = 0; i < num_targets; ++i) block[i + 1] += block[i];
}

template <class Index, class Id>
void fill_sample(const Sampling<Index>& a, const SampledRow* rows, int64_t num_targets, const int64_t* block,
                 Id* edge_ids, Index* sources, double* scale, int num_threads) {
  const int64_t num_chunks = (num_targets + kChunk - 1) / kChunk;
#pragma omp parallel num_threads(num_threads)
  {
    Drawer<Index> drawer(a);
#pragma omp for schedule(dynamic, 16)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const int64_t first = chunk * kChunk, last = std::min(first + kChunk, num_targets);
      int64_t at = block[first];
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = rows[i].begin;
        drawer.draw(rows[i], [&](int64_t position, double factor) {
          __builtin_prefetch(a.indices + begin + position);
          if (scale != nullptr) scale[at] = factor;
          edge_ids[at++] = static_cast<Id>(begin + position);
        });
      }
      for (at = block[first]; at < block[last]; ++at) sources[at] = a.indices[edge_ids[at]];
    }
  }
}

#define WEFT_INSTANTIATE_FILL(Index, Id)                                                                            \
  template void fill_sample(const Sampling<Index>&, const SampledRow*, int64_t, const int64_t*, Id*, Index*, double*, \
                            int);
#define WEFT_INSTANTIATE(Index)                                                                            \
  template void count_sample(const Sampling<Index>&, const int64_t*, int64_t, int64_t, SampledRow*, int64_t*, \
                             double*, int);                                                                \
  WEFT_INSTANTIATE_FILL(Index, int32_t)                                                                    \
  WEFT_INSTANTIATE_FILL(Index, int64_t)
WEFT_INSTANTIATE(int32_t)
WEFT_INSTANTIATE(int64_t)

}  // namespace weft
