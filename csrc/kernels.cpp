// Compiled once per instruction set; see CMakeLists.txt.
#include "kernels.h"

#include "attend.h"
#include "dropout.h"
#include "pairs.h"
#include "spmm.h"

namespace weft::WEFT_ISA {

template <class T, class I>
constexpr GraphKernels<T, I> graph_table() {
  return {&spmm<T, I>, &spmm_max<T, I>, &spmm_max_backward<T, I>, &attend<T, I>, &attend_backward<T, I>,
          &pair_logits<T, I>, &pair_backward<T, I>, &drop_edges<T, I>, &weigh<T, I>, &weigh_backward<T, I>};
}

template <class T>
constexpr RowKernels<T> row_table() {
  return {&attend_stats<T>, &edge_softmax<T>, &dropout<T>, &relu_dropout_backward<T>};
}

const Kernels kernels{graph_table<float, int32_t>(),
                      graph_table<float, int64_t>(),
                      graph_table<double, int32_t>(),
                      graph_table<double, int64_t>(),
                      row_table<float>(),
                      row_table<double>()};

}  // namespace weft::WEFT_ISA
