// Which build of the kernels runs: the best one this processor has, or a lower one on request.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace weft {

std::vector<std::string> supported_isas();  // from the plainest to the best
std::string current_isa();
void set_isa(const std::string& name);  // throws std::invalid_argument where the processor lacks it
const Kernels& kernels();

}  // namespace weft
