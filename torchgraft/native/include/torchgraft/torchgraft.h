#pragma once

namespace torchgraft {

// The version of torch that this library was built against.
const char* torch_version();

}  // namespace torchgraft
