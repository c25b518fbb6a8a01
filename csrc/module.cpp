#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "isa.h"

NB_MODULE(_native, module) {
  module.doc() = "The C++ layer of weft: graph building and the kernels, independent of the version of PyTorch.";
  module.attr("INTERFACE") = 20;  // must equal the number in weft/runtime/native.py
  weft::bind_citations(module);
  weft::bind_graph(module);
  weft::bind_host(module);
  weft::bind_kernels(module);
  weft::bind_messages(module);
  weft::bind_partition(module);
  weft::bind_sampling(module);
  weft::bind_schedule(module);
  module.def("supported_isas", &weft::supported_isas);
  module.def("current_isa", &weft::current_isa);
  module.def("set_isa", &weft::set_isa, nanobind::arg("name"));
  weft::current_isa();  // raises the error of a wrong WEFT_ISA now, not in the first kernel
}
