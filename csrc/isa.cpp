#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace weft {
namespace {

struct Build {
  std::string name;
  const Kernels* kernels;
};

std::vector<Build> builds() {
  std::vector<Build> supported{{"baseline", &baseline::kernels}};
#ifdef WEFT_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    supported.push_back({"avx2", &avx2::kernels});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
      supported.push_back({"avx512", &avx512::kernels});
    }
  }
#endif
  return supported;
}

Build find(const std::string& name) {
  std::string names;
  for (const Build& build : builds()) {
    if (build.name == name) return build;
    names += (names.empty() ? "" : ", ") + build.name;
  }
  throw std::invalid_argument("this processor cannot run instruction set '" + name + "': WEFT_ISA is one of " + names);
}

Build& current() {
  static Build build = [] {
    const char* wanted = std::getenv("WEFT_ISA");
    return wanted && *wanted ? find(wanted) : builds().back();
  }();
  return build;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Build& build : builds()) names.push_back(build.name);
  return names;
}

std::string current_isa() { return current().name; }
void set_isa(const std::string& name) { current() = find(name); }
const Kernels& kernels() { return *current().kernels; }

}  // namespace weft
