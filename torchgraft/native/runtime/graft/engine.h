// Programs inside ScriptModules: the operator `torchgraft::run_engine`.
#pragma once

#include <cstdint>

namespace torchgraft {

// Lets go of the programs that were loaded from buffers, and says how many there were; they are loaded
// again when they are called.
int64_t forget_engines();

}  // namespace torchgraft
