// Dropout of attention weights by edge and head. The masks are computed where they are needed and never stored.
#pragma once

#include "chunk.h"
#include "dropout.h"
#include "kernels.h"

namespace weft::WEFT_ISA {

// The masks of a chunk of a row's entries. Pass the chunks of a row in order, since parallel edges are counted.
struct EdgeMask {
  const EdgeDropout* const dropout;
  int64_t before = -1;  // neighbour of the previous entry
  uint64_t copy = 0;    // number of previous entries with the same neighbour
  alignas(64) uint32_t low[kChunk] = {}, high[kChunk] = {};

  explicit EdgeMask(const EdgeDropout* drops) : dropout(drops) {}

  // Call it before the entries of a row, and before a self-loop that is drawn separately.
  void begin() { before = -1; }

  // Computes the random words of `count` entries. Rows are targets, or sources if kTransposed. loop: one more entry
  // follows, the self-loop, which is no copy of a parallel edge.
  template <bool kTransposed, class I>
  void draw(int64_t row, const I* indices, int64_t count, bool loop) {
    for (int64_t e = 0; e < count + loop; ++e) {
      const int64_t neighbour = e < count ? indices[e] : row;
      copy = e < count && neighbour == before ? copy + 1 : 0;
      before = neighbour;
      const int64_t source = kTransposed ? row : neighbour, target = kTransposed ? neighbour : row;
      const uint64_t mixed = mix64(dropout->key ^ static_cast<uint64_t>(dropout->target_ids[target]));
      uint64_t word = mix64(mixed ^ static_cast<uint64_t>(dropout->source_ids[source]));
      if (copy) word = mix64(word ^ copy);
      low[e] = static_cast<uint32_t>(word);
      high[e] = static_cast<uint32_t>(word >> 32);
    }
  }

  bool drops(int64_t e, int64_t head) const {
    return column_hash(low[e], high[e], dropout->first_head + static_cast<uint32_t>(head)) < dropout->threshold;
  }

  // Applies the mask of a head to the weights of the chunk, and to `positive` unless it is null.
  template <class T>
  void drop(int64_t head, int64_t count, T* weight, T* positive) const {
    constexpr int L = kLanes<T>;
    using U = Vector<uint32_t, L>;
    const T scale = static_cast<T>(dropout->scale);
    const U number = U{} + (dropout->first_head + static_cast<uint32_t>(head));
    for (int64_t e = 0; e < count; e += L) {
      const auto kept = column_hash(load<L>(low + e), load<L>(high + e), number) >= dropout->threshold;
      store<L>(weight + e, where<T, L>(kept, load<L>(weight + e) * scale));
      if (positive) store<L>(positive + e, where<T, L>(kept, load<L>(positive + e) * scale));
    }
  }
};

}  // namespace weft::WEFT_ISA
