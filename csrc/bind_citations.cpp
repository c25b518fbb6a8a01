#include <nanobind/stl/pair.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "bindings.h"
#include "citations.h"

namespace weft {
namespace {

using namespace nb::literals;
using Vector = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

// A vector as an array that owns it, without a copy.
Vector owned(std::vector<int32_t>&& values) {
  auto kept = std::make_unique<std::vector<int32_t>>(std::move(values));
  int32_t* data = kept->data();
  const size_t size = kept->size();
  nb::capsule owner(kept.release(), [](void* vector) noexcept { delete static_cast<std::vector<int32_t>*>(vector); });
  return Vector(data, {size}, owner);
}

CitationModel model_of(uint64_t seed, int64_t num_papers, double mean_references, ConstArray<int32_t, 1> class_of_topic,
                       ConstArray<int64_t, 1> first_topics, ConstArray<int32_t, 1> topics) {
  const auto num_topics = static_cast<int64_t>(topics.shape(0));
  require(num_topics >= 1 && class_of_topic.shape(0) == topics.shape(0) && first_topics.shape(0) >= 2,
          "class_of_topic and topics must have the same length, at least 1, and first_topics at least 2");
  const auto num_classes = static_cast<int64_t>(first_topics.shape(0)) - 1;
  const auto below = [](auto limit) { return [limit](auto value) { return value >= 0 && value < limit; }; };
  require(first_topics.data()[0] == 0 && first_topics.data()[num_classes] == num_topics &&
              std::is_sorted(first_topics.data(), first_topics.data() + num_classes + 1),
          "first_topics must ascend from 0 to the number of topics");
  require(std::all_of(topics.data(), topics.data() + num_topics, below(num_topics)) &&
              std::all_of(class_of_topic.data(), class_of_topic.data() + num_topics, below(num_classes)),
          "topics and their classes must be in range");
  require(num_papers >= 0 && num_papers < int64_t{1} << 31 && mean_references > 0,
          "num_papers must be below 2^31, mean_references positive");
  return {seed,       num_papers,           mean_references, num_topics, class_of_topic.data(), first_topics.data(),
          topics.data()};
}

}  // namespace

void bind_citations(nb::module_& module) {
  module.def(
      "cite",
      [](uint64_t seed, int64_t num_papers, double mean_references, ConstArray<int32_t, 1> class_of_topic,
         ConstArray<int64_t, 1> first_topics, ConstArray<int32_t, 1> topics, int64_t first, int64_t last,
         int num_threads) {
        const CitationModel model =
            model_of(seed, num_papers, mean_references, class_of_topic, first_topics, topics);
        require(0 <= first && first <= last && last <= num_papers && num_threads >= 1,
                "the range must lie within the papers, num_threads not be below 1");
        References made;
        {
          nb::gil_scoped_release release;
          made = cite(model, first, last, num_threads);
        }
        return std::pair(owned(std::move(made.counts)), owned(std::move(made.cited)));
      },
      "seed"_a, "num_papers"_a, "mean_references"_a, "class_of_topic"_a.noconvert(), "first_topics"_a.noconvert(),
      "topics"_a.noconvert(), "first"_a, "last"_a, "num_threads"_a);
  module.def(
      "paper_features",
      [](uint64_t seed, ConstArray<int32_t, 1> class_of_topic, ConstArray<float, 2> means, int64_t first,
         Array<float, 2> x, int num_threads) {
        const auto num_topics = static_cast<int64_t>(class_of_topic.shape(0));
        const auto* classes = class_of_topic.data();
        require(num_topics >= 1 && first >= 0 && x.shape(1) == means.shape(1) && num_threads >= 1,
                "there must be a topic, x and means must have the same width, num_threads not be below 1");
        require(std::all_of(classes, classes + num_topics,
                            [&](int32_t c) { return c >= 0 && c < static_cast<int64_t>(means.shape(0)); }),
                "each topic's class must have a row of means");
        const CitationModel model{seed, 0, 1.0, num_topics, classes, nullptr, nullptr};
        nb::gil_scoped_release release;
        paper_features(model, means.data(), static_cast<int64_t>(means.shape(1)), first,
                       first + static_cast<int64_t>(x.shape(0)), x.data(), num_threads);
      },
      "seed"_a, "class_of_topic"_a.noconvert(), "means"_a.noconvert(), "first"_a, "x"_a.noconvert(), "num_threads"_a);
  module.def(
      "paper_draws",
      [](uint64_t seed, uint64_t stream, int64_t first, Array<double, 1> uniform, int num_threads) {
        require(first >= 0 && num_threads >= 1, "first must not be negative, num_threads not be below 1");
        nb::gil_scoped_release release;
        paper_draws(seed, stream, first, first + static_cast<int64_t>(uniform.shape(0)), uniform.data(), num_threads);
      },
      "seed"_a, "stream"_a, "first"_a, "uniform"_a.noconvert(), "num_threads"_a);
}

}  // namespace weft
