// Selects the build of the kernels: the one for the processor's best instruction set, or a lower one on request.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace weft {

std::vector<std::string> supported_isas();  // from the baseline to the best
std::string current_isa();
void set_isa(const std::string& name);  // throws std::invalid_argument if the processor lacks it
const Kernels& kernels();

}  // namespace weft
