// A citation-like graph of any size, generated part by part: which earlier papers each paper cites, its topic's class,
// its label and its features. Every number is a function of (seed, paper, counter), so a part depends on nothing but
// itself, and neither parts nor threads change the graph. docs/decisions/0054 describes the model.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

struct CitationModel {
  uint64_t seed;
  int64_t num_papers;
  double mean_references;  // per paper
  int64_t num_topics;      // papers t, t + num_topics, t + 2 * num_topics, ... have topic t
  // Topics by class: those of class c are topics[first_topics[c]] to topics[first_topics[c + 1] - 1].
  const int32_t* class_of_topic;
  const int64_t* first_topics;
  const int32_t* topics;
};

// The references of papers [first, last): distinct earlier papers, ascending.
struct References {
  std::vector<int32_t> counts;  // [last - first]
  std::vector<int32_t> cited;   // [sum of counts], one paper after the other
};

References cite(const CitationModel& model, int64_t first, int64_t last, int num_threads);

// Fills x [last - first, width]: the row of means of each paper's class, plus noise of variance 1.
void paper_features(const CitationModel& model, const float* means, int64_t width, int64_t first, int64_t last,
                    float* x, int num_threads);

// Fills uniform [last - first] with numbers in [0, 1) that depend on (seed, paper, stream). The streams of references
// and features are other ones.
void paper_draws(uint64_t seed, uint64_t stream, int64_t first, int64_t last, double* uniform, int num_threads);

}  // namespace weft
