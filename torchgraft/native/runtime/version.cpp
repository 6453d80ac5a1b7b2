#include <torchgraft/torchgraft.h>

namespace torchgraft {
const char* torch_version() { return GRAFT_TORCH; }
}  // namespace torchgraft
