// Types of the arrays that Python passes: on the CPU, of exactly the given dtype, C-contiguous unless stated otherwise.
// They are never copied or converted.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

namespace weft {

namespace nb = nanobind;

template <class T, size_t Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

template <class T, size_t Dims>
using ConstArray = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

// A matrix whose rows may have padding between them.
template <class T>
using ConstRows = nb::ndarray<const T, nb::ndim<2>, nb::device::cpu>;

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void bind_citations(nb::module_& module);
void bind_graph(nb::module_& module);
void bind_host(nb::module_& module);
void bind_kernels(nb::module_& module);
void bind_messages(nb::module_& module);
void bind_partition(nb::module_& module);
void bind_sampling(nb::module_& module);
void bind_schedule(nb::module_& module);

}  // namespace weft
