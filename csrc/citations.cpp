#include "citations.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <utility>

namespace weft {
namespace {

constexpr double kSameTopic = 0.6, kSameClass = 0.2;  // shares of references; the others go to any earlier paper
constexpr double kFamous = 0.6;                       // share of references that prefer often cited papers
constexpr int64_t kRecent = 64;                       // the others go to one of so many papers just before
constexpr int kMaxDraws = 4;                          // for a reference, until it is not a duplicate
constexpr size_t kMaxReferences = 1000;               // of a paper
constexpr uint64_t kReferences = 1, kFeatures = 2, kFirstFree = 16;  // streams

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection whose output bits depend on all input bits.
uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// The key of a paper's random words in a stream.
uint64_t key_of(uint64_t seed, uint64_t stream, int64_t paper) {
  return mix(mix(seed * 0x9E3779B97F4A7C15u + stream) + static_cast<uint64_t>(paper));
}

// Random words of a key, one after the other.
class Words {
 public:
  explicit Words(uint64_t key) : state_(key) {}
  uint64_t next() { return mix(state_ += 0x9E3779B97F4A7C15u); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  int64_t below(int64_t count) { return static_cast<int64_t>(uniform() * static_cast<double>(count)); }

 private:
  uint64_t state_;
};

// One of `count` papers in order of time. Under preferential attachment, the share of all citations that go to the
// first i of n papers is (i / n)^(1/2) (Barabasi, Albert 1999). Here it is (i / n)^(2/5), so the power law of the number
// of citations has the exponent 1 + 1 / (1 - 2/5) = 2.67.
int64_t choose(Words& words, int64_t count) {
  if (words.uniform() < kFamous) {
    const double u = words.uniform();
    return std::min(count - 1, static_cast<int64_t>(u * u * std::sqrt(u) * static_cast<double>(count)));
  }
  const int64_t recent = std::min(count, kRecent);
  return count - recent + words.below(recent);
}

int64_t draw_reference(const CitationModel& model, Words& words, int64_t paper) {
  const double kind = words.uniform();
  if (kind < kSameTopic + kSameClass) {
    int64_t topic = paper % model.num_topics;
    if (kind >= kSameTopic) {
      const int32_t c = model.class_of_topic[topic];
      topic = model.topics[model.first_topics[c] + words.below(model.first_topics[c + 1] - model.first_topics[c])];
    }
    // Papers of the topic before this one: topic, topic + num_topics, ...
    if (const int64_t count = (paper - topic + model.num_topics - 1) / model.num_topics; paper > topic && count > 0) {
      return topic + choose(words, count) * model.num_topics;
    }
  }
  return choose(words, paper);
}

void cite_range(const CitationModel& model, int64_t first, int64_t last, References& made) {
  // The number of references is geometric, from 0 on: at least k with probability q^k. (A logarithm would round
  // differently on other machines.)
  std::vector<double> at_least;
  const double q = model.mean_references / (1 + model.mean_references);
  for (double p = q; p > 0x1p-53 && at_least.size() < kMaxReferences; p *= q) at_least.push_back(p);
  for (int64_t paper = first; paper < last; ++paper) {
    Words words(key_of(model.seed, kReferences, paper));
    const auto drawn = std::lower_bound(at_least.begin(), at_least.end(), words.uniform(), std::greater<>());
    const int64_t wanted = std::min<int64_t>(drawn - at_least.begin(), paper);
    const size_t begin = made.cited.size();
    for (int64_t reference = 0; reference < wanted; ++reference) {
      for (int draw = 0; draw < kMaxDraws; ++draw) {
        const auto cited = static_cast<int32_t>(draw_reference(model, words, paper));
        const auto place = std::lower_bound(made.cited.begin() + begin, made.cited.end(), cited);
        if (place != made.cited.end() && *place == cited) continue;
        made.cited.insert(place, cited);
        break;
      }
    }
    made.counts.push_back(static_cast<int32_t>(made.cited.size() - begin));
  }
}

}  // namespace

References cite(const CitationModel& model, int64_t first, int64_t last, int num_threads) {
  std::vector<References> parts(num_threads);
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int part = 0; part < num_threads; ++part) {
    const int64_t count = last - first;
    cite_range(model, first + count * part / num_threads, first + count * (part + 1) / num_threads, parts[part]);
  }
  References all = std::move(parts[0]);
  for (int part = 1; part < num_threads; ++part) {
    all.counts.insert(all.counts.end(), parts[part].counts.begin(), parts[part].counts.end());
    all.cited.insert(all.cited.end(), parts[part].cited.begin(), parts[part].cited.end());
  }
  return all;
}

void paper_features(const CitationModel& model, const float* means, int64_t width, int64_t first, int64_t last,
                    float* x, int num_threads) {
  // The noise is the sum of four uniform bytes, less their mean, divided by its standard deviation.
  const float scale = 1.0f / std::sqrt(4 * (256.0f * 256.0f - 1) / 12);
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t paper = first; paper < last; ++paper) {
    const uint64_t key = key_of(model.seed, kFeatures, paper);
    const float* mean = means + width * model.class_of_topic[paper % model.num_topics];
    float* row = x + width * (paper - first);
    for (int64_t column = 0; column < width; ++column) {
      const uint64_t word = mix(key + 0x9E3779B97F4A7C15u * (static_cast<uint64_t>(column / 2) + 1));
      const auto half = static_cast<uint32_t>(column % 2 ? word >> 32 : word);
      const uint32_t sum = (half & 255) + (half >> 8 & 255) + (half >> 16 & 255) + (half >> 24);
      row[column] = mean[column] + (static_cast<float>(sum) - 510.0f) * scale;
    }
  }
}

void paper_draws(uint64_t seed, uint64_t stream, int64_t first, int64_t last, double* uniform, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t paper = first; paper < last; ++paper) {
    uniform[paper - first] = Words(key_of(seed, kFirstFree + stream, paper)).uniform();
  }
}

}  // namespace weft
