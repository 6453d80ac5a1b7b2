// CUDA as torch has loaded it. Neither its headers nor its libraries are needed to build this.
#pragma once

#include <string>
#include <utility>

#include <c10/core/Stream.h>

namespace torchgraft {

// The compute capability of a device, and what the device is called.
std::pair<int, int> cuda_capability(c10::Device device);
std::string cuda_name(c10::Device device);
// The version of CUDA that torch was built with, as `torch.version.cuda` has it.
std::string cuda_version();
// Whether work on a stream is being captured into a graph; never, on a device that has none.
bool is_capturing(const c10::Stream& stream);
// A copy within a device in the graph that a stream is captured into, behind what is there; its node.
void* add_copy(const c10::Stream& stream, void* to, const void* from, size_t bytes);
// Where a copy of later launches of a graph, `exec`, goes to and comes from.
void redirect(void* exec, void* node, void* to, const void* from, size_t bytes);

}  // namespace torchgraft
