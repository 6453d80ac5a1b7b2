#include "graft/cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "graft/machine.h"

namespace torchgraft {
namespace {

// A function of a library that is loaded, also where Python loaded it for torch alone.
void* found(const char* library, const char* name) {
  const std::string path = loaded([&](const std::string& file) { return file.rfind(library, 0) == 0; });
  void* const handle = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  void* const address = handle ? dlsym(handle, name) : nullptr;
  if (!address) throw Error(std::string(library) + " with " + name + " is not loaded, though torch has CUDA");
  return address;
}

template <typename F>
F runtime(const char* name) { return reinterpret_cast<F>(found("libcudart.so", name)); }

template <typename F>
F driver(const char* name) { return reinterpret_cast<F>(found("libcuda.so", name)); }

void check(int status, const char* call) {
  if (status != 0) throw Error(std::string(call) + " failed with CUDA's error " + std::to_string(status));
}

int attribute(int which, c10::Device device) {
  static const auto get = runtime<int (*)(int*, int, int)>("cudaDeviceGetAttribute");
  int value = 0;
  check(get(&value, which, device.index()), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

std::pair<int, int> cuda_capability(c10::Device device) {
  return {attribute(75, device), attribute(76, device)};  // cudaDevAttrComputeCapabilityMajor, -Minor
}

std::string cuda_name(c10::Device device) {
  static const auto get = driver<int (*)(char*, int, int)>("cuDeviceGetName");
  static const auto by_bus = driver<int (*)(int*, const char*)>("cuDeviceGetByPCIBusId");
  static const auto bus = runtime<int (*)(char*, int, int)>("cudaDeviceGetPCIBusId");
  char text[256] = {};
  int handle = 0;
  check(bus(text, sizeof(text), device.index()), "cudaDeviceGetPCIBusId");
  check(by_bus(&handle, text), "cuDeviceGetByPCIBusId");
  check(get(text, sizeof(text), handle), "cuDeviceGetName");
  return text;
}

std::string cuda_version() {
  const long version = at::detail::getCUDAHooks().versionCUDART();
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

bool is_capturing(const c10::Stream& stream) {
  if (stream.device_type() != c10::kCUDA) return false;
  static const auto get = runtime<int (*)(void*, int*)>("cudaStreamIsCapturing");
  int status = 0;
  check(get(stream.native_handle(), &status), "cudaStreamIsCapturing");
  return status != 0;
}

constexpr int kDeviceToDevice = 3;        // cudaMemcpyDeviceToDevice
constexpr unsigned kSetDependencies = 1;  // CU_STREAM_SET_CAPTURE_DEPENDENCIES

void* add_copy(const c10::Stream& stream, void* to, const void* from, size_t bytes) {
  static const auto about = driver<int (*)(void*, int*, uint64_t*, void**, void* const**, size_t*)>(
      "cuStreamGetCaptureInfo_v2");
  static const auto add =
      runtime<int (*)(void**, void*, void* const*, size_t, void*, const void*, size_t, int)>(
          "cudaGraphAddMemcpyNode1D");
  static const auto then =
      driver<int (*)(void*, void**, size_t, unsigned)>("cuStreamUpdateCaptureDependencies");
  int status = 0;
  uint64_t number = 0;
  void *graph = nullptr, *node = nullptr;
  void* const* before = nullptr;
  size_t count = 0;
  void* const handle = stream.native_handle();
  check(about(handle, &status, &number, &graph, &before, &count), "cuStreamGetCaptureInfo");
  check(add(&node, graph, before, count, to, from, bytes, kDeviceToDevice), "cudaGraphAddMemcpyNode1D");
  check(then(handle, &node, 1, kSetDependencies), "cuStreamUpdateCaptureDependencies");
  return node;
}

void redirect(void* exec, void* node, void* to, const void* from, size_t bytes) {
  static const auto set = runtime<int (*)(void*, void*, void*, const void*, size_t, int)>(
      "cudaGraphExecMemcpyNodeSetParams1D");
  check(set(exec, node, to, from, bytes, kDeviceToDevice), "cudaGraphExecMemcpyNodeSetParams1D");
}

// CUDA_KERNEL_NODE_PARAMS_v2.
struct Told::How {
  void* function;
  unsigned grid[3], block[3], shared;
  void** arguments;
  void** extra;
  void* kernel;
  void* context;
};

Told::Told(void* node) : node_(node), how_(std::make_shared<How>()) {
  static const auto get = driver<int (*)(void*, How*)>("cuGraphKernelNodeGetParams_v2");
  static const auto size_of = driver<int (*)(void*, size_t, size_t*, size_t*)>("cuFuncGetParamInfo");
  static const auto of_kernel = driver<int (*)(void*, size_t, size_t*, size_t*)>("cuKernelGetParamInfo");
  check(get(node, how_.get()), "cuGraphKernelNodeGetParams");
  if (!how_->arguments || how_->extra) return;
  const auto about = how_->function ? size_of : of_kernel;
  void* const code = how_->function ? how_->function : how_->kernel;
  size_t offset = 0, size = 0;
  while (about(code, values_.size(), &offset, &size) == 0) {
    if (size > sizeof(uint64_t)) return;
    uint64_t value = 0;
    std::memcpy(&value, how_->arguments[values_.size()], size);
    values_.push_back(value);
  }
  for (uint64_t& value : values_) places_.push_back(&value);
  how_->arguments = places_.data();
  plain_ = true;
}

void Told::tell(void* exec) {
  static const auto set = driver<int (*)(void*, void*, const How*)>("cuGraphExecKernelNodeSetParams_v2");
  check(set(exec, node_, how_.get()), "cuGraphExecKernelNodeSetParams");
}

namespace {

constexpr int kKernel = 0, kEmpty = 5;  // CU_GRAPH_NODE_TYPE_

// What a function of the driver's lists of a graph, or of one of its nodes.
std::vector<void*> listed(const char* name, void* of) {
  const auto list = driver<int (*)(void*, void**, size_t*)>(name);
  size_t count = 0;
  check(list(of, nullptr, &count), name);
  std::vector<void*> all(count);
  if (count) check(list(of, all.data(), &count), name);
  return all;
}

}  // namespace

std::vector<Told> kernels_of(void* graph, const std::vector<void*>& copies) {
  static const auto kind_of = driver<int (*)(void*, int*)>("cuGraphNodeGetType");
  std::vector<Told> kernels;
  for (void* const node : listed("cuGraphGetNodes", graph)) {
    int kind = 0;
    check(kind_of(node, &kind), "cuGraphNodeGetType");
    if (kind == kEmpty || std::find(copies.begin(), copies.end(), node) != copies.end()) continue;
    if (kind != kKernel) return {};
    kernels.emplace_back(node);
    if (!kernels.back().is_plain()) return {};
  }
  return kernels;
}

void take_out(void* graph, void* node) {
  static const auto order = driver<int (*)(void*, void* const*, void* const*, size_t)>("cuGraphAddDependencies");
  static const auto destroy = driver<int (*)(void*)>("cuGraphDestroyNode");
  const auto before = listed("cuGraphNodeGetDependencies", node), after = listed("cuGraphNodeGetDependentNodes", node);
  for (void* const first : before)
    for (void* const then : after) check(order(graph, &first, &then, 1), "cuGraphAddDependencies");
  check(destroy(node), "cuGraphDestroyNode");
}

}  // namespace torchgraft
