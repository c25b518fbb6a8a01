// Compiled once per instruction set; see CMakeLists.txt.
#include "kernels.h"

#include "attend.h"
#include "dropout.h"
#include "messages.h"
#include "pairs.h"
#include "spmm.h"

namespace weft::WEFT_ISA {

template <class R, class I>
constexpr SumKernels<R, I> sum_table() {
  return {&spmm<R, R, I>, &spmm<R, Sum<R>, I>, &scatter<R, I>, &attend<R, I>, &attend_backward<R, I>};
}

template <class R>
constexpr RowKernels<R> row_table() {
  return {&attend_stats<R>, &dropout<R>, &relu_dropout_backward<R>};
}

template <class T, class I>
constexpr GraphKernels<T, I> graph_table() {
  return {&spmm_max<T, I>,   &spmm_max_backward<T, I>, &pair_logits<T, I>, &pair_backward<T, I>,
          &edge_softmax<T>, &drop_edges<T, I>,        &weigh<T, I>,       &weigh_backward<T, I>};
}

const Kernels kernels{sum_table<float, int32_t>(),
                      sum_table<float, int64_t>(),
                      sum_table<double, int32_t>(),
                      sum_table<double, int64_t>(),
                      sum_table<BFloat16, int32_t>(),
                      sum_table<BFloat16, int64_t>(),
                      row_table<float>(),
                      row_table<double>(),
                      row_table<BFloat16>(),
                      {&run_messages<float>},
                      {&run_messages<double>},
                      graph_table<float, int32_t>(),
                      graph_table<float, int64_t>(),
                      graph_table<double, int32_t>(),
                      graph_table<double, int64_t>()};

}  // namespace weft::WEFT_ISA
