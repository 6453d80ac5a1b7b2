// Programs inside ScriptModules: the operator `torchgraft::run_engine`.
#pragma once

namespace torchgraft {

// Lets go of the programs that were loaded from buffers; they are loaded again when they are called.
void forget_engines();

}  // namespace torchgraft
