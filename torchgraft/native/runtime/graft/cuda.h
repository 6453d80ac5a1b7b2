// CUDA as torch has loaded it. Neither its headers nor its libraries are needed to build this.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

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

// A kernel of a graph, and what it is told. It may be told something else before a launch.
class Told {
 public:
  explicit Told(void* node);
  Told(Told&&) = default;
  // Whether each argument is a number or an address: then the addresses that it knows are among them.
  bool is_plain() const { return plain_; }
  std::vector<uint64_t>& values() { return values_; }
  // What later launches of `exec` tell it.
  void tell(void* exec);

 private:
  struct How;  // as the driver has it
  void* node_;
  std::shared_ptr<How> how_;
  std::vector<uint64_t> values_;
  std::vector<void*> places_;
  bool plain_ = false;
};

// The kernels of a graph; none where it has anything else, but for the copies named.
std::vector<Told> kernels_of(void* graph, const std::vector<void*>& copies);
// Take a node out of a graph: what came after it comes after what came before it.
void take_out(void* graph, void* node);

}  // namespace torchgraft
