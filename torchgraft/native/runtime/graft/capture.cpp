#include "graft/capture.h"

#ifndef GRAFT_CUDA

namespace torchgraft {

bool captures() { return false; }

std::shared_ptr<Linked> captured(
    std::shared_ptr<Linked> program, c10::Device, Edge, std::function<void(const std::string&)> refused) {
  refused("this libtorchgraft was built where CUDA's headers were not found");
  return program;
}

}  // namespace torchgraft

#else

#include <atomic>
#include <list>

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "graft/cuda.h"

namespace torchgraft {
namespace {

constexpr size_t kMostShapes = 16;  // captured shapes of one program; the least recently used one goes
constexpr size_t kFew = 2;  // kernels that are told where an input lies, rather than that it is copied
constexpr uintptr_t kAligned = 16;  // bytes, as generated code may count on
constexpr int64_t kAhead = 1 << 24;  // bytes of outputs up to which those of the next call are made while this one runs

// A graph of torch's. Its class has members only for some versions of CUDA, so that torch may have made it
// larger than this file sees it: there is room for that.
class Graph {
 public:
  Graph() { new (room_) at::cuda::CUDAGraph(true); }  // nodes can be told other addresses
  ~Graph() { get().~CUDAGraph(); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  at::cuda::CUDAGraph& get() { return *std::launder(reinterpret_cast<at::cuda::CUDAGraph*>(room_)); }

 private:
  alignas(64) char room_[sizeof(at::cuda::CUDAGraph) + 1024];
};

// Whether a step back could be done.
bool done(const std::function<void()>& step) {
  try {
    step();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// Takes no more pinned memory from a pool: it has a pool for that too, from torch 2.12 on.
template <typename Host>
void leave(Host* host, at::cuda::MempoolId_t pool) {
  if constexpr (requires { host->end_allocate_to_pool(pool); }) {
    if (done([&] { host->end_allocate_to_pool(pool); })) done([&] { host->release_pool(pool); });
  }
}

// Work of the current stream becomes `graph`; other threads are not disturbed. torch (to 2.13) leaves a
// failed capture half open: its memory pool stays in use, and the generator of random numbers believes that
// it is captured for ever. Here both are put right. A capture that can still be ended is not half open: its
// graph gives the pool back when it goes, and to do that twice ends the process.
void capture(at::cuda::CUDAGraph& graph, c10::Device device, const std::function<void()>& work) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  const auto pool = at::cuda::graph_pool_handle();
  try {
    graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    work();
    graph.capture_end();
  } catch (...) {
    done([&] { graph.capture_end(); });
    if (done([&] { allocator::endAllocateToPool(device.index(), pool); })) {
      done([&] { allocator::releasePool(device.index(), pool); });
      leave(at::getHostAllocator(at::kCUDA), pool);
      done([&] {
        Graph empty;
        empty.get().capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
        empty.get().capture_end();
      });
    }
    throw;
  }
}

// How many elements lie between the first and the last one.
int64_t span(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t reach = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  return reach;
}

bool same_memory(const at::Tensor& one, const at::Tensor& two) {
  return one.numel() && two.numel() && one.is_alias_of(two) && one.scalar_type() == two.scalar_type();
}

int64_t bytes_of(const at::Tensor& tensor) { return span(tensor) * static_cast<int64_t>(tensor.element_size()); }

bool same_layout(const at::Tensor& one, const at::Tensor& two) {
  return one.storage_offset() == two.storage_offset() && one.sizes() == two.sizes() &&
         one.strides() == two.strides();
}

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAligned == 0;
}

// The same layout in memory of our own, whatever is between the elements included.
at::Tensor twin(const at::Tensor& given) {
  const at::Tensor row = given.as_strided({span(given)}, {1}, given.storage_offset());
  return row.clone().as_strided(given.sizes(), given.strides());
}

// An argument of a kernel of the graph that is an address in some memory: so many bytes from its start.
struct Use {
  size_t kernel, argument;
  uint64_t offset;
};

// An input that the graph copies into its own memory, and back if it is written; or one that its kernels read
// where it lies.
struct Moved {
  size_t input;
  void *own, *at;
  size_t bytes;
  void *node = nullptr, *back = nullptr;
  std::vector<Use> uses;
};

// Outputs that share memory: made as one tensor, of which each is a view.
struct Group {
  std::vector<size_t> outputs;
  int64_t low = INT64_MAX, high = 0;
  bool alike = true;
  void *origin = nullptr, *node = nullptr, *at = nullptr;
  size_t bytes = 0;
  std::vector<Use> uses;  // of the kernel that writes it where it is to lie
};

// The capture of one shape. Copies at its edge are nodes of the graph, so that a call is one launch, and
// CUDA itself runs launches of one graph in turns, on whatever stream they come.
struct Shape {
  Graph graph;
  void* exec = nullptr;
  Values inputs;                   // the graph's own; a fixed one is the caller's
  Values outputs;                  // the graph's own
  std::vector<Moved> moved;
  std::map<size_t, size_t> views;  // outputs that are views of an input
  std::vector<Group> groups;
  std::vector<Told> kernels;       // where each is told addresses alone
  bool ahead = false;
  Values ready;                    // outputs of the next call, made for this stream and mode
  c10::StreamId stream = 0;
  bool inference = false;
};

class Captured : public Linked {
 public:
  Captured(std::shared_ptr<Linked> program, c10::Device device, Edge edge,
           std::function<void(const std::string&)> refused)
      : program_(std::move(program)), device_(device), edge_(std::move(edge)),
        tell_(std::move(refused)) {}

  ~Captured() override {
    if (!shapes_.empty()) done([&] { finish(); });
  }

  Values run(Values inputs) override {
    const c10::OptionalDeviceGuard on(device_);
    const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    if (!refused_ && !is_capturing(current)) {
      std::lock_guard<std::mutex> hold(lock_);
      if (Shape* shape = shape_of(inputs, current)) return replay(*shape, inputs, current);
    }
    return program_->run(std::move(inputs));
  }

 private:
  using Key = std::vector<int64_t>;

  // Memory of a graph that runs must stay.
  void finish() const { c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index()); }

  // Whether the graph works on an input itself: what is between the elements of one that is written is
  // somebody else's, and must not be copied back.
  bool stays(size_t i, const at::Tensor& given) const {
    return edge_.fixed.count(i) || (edge_.written.count(i) && span(given) != given.numel());
  }

  void read_key(const Values& inputs, Key& key) const {
    key.clear();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].isTensor()) {
        key.push_back(inputs[i].toInt());
        continue;
      }
      const at::Tensor& given = inputs[i].toTensor();
      key.insert(key.end(), given.sizes().begin(), given.sizes().end());
      key.insert(key.end(), given.strides().begin(), given.strides().end());
      key.push_back(stays(i, given) ? reinterpret_cast<int64_t>(given.data_ptr()) : is_aligned(given));
    }
  }

  // The graph of these inputs' shapes; null where there can be none.
  Shape* shape_of(const Values& inputs, const c10::Stream& current) {
    for (const c10::IValue& input : inputs)
      if (!input.isInt() && (!input.isTensor() || input.toTensor().device() != device_ ||
                             input.toTensor().layout() != at::kStrided))
        return refuse("an input is no dense tensor on " + device_.str());
    read_key(inputs, key_);
    for (auto it = shapes_.begin(); it != shapes_.end(); ++it) {
      if (it->first != key_) continue;
      shapes_.splice(shapes_.begin(), shapes_, it);
      return shapes_.front().second.get();
    }
    try {
      shapes_.emplace_front(key_, capture_shape(inputs, current));
    } catch (const c10::Error& error) {
      return refuse(error.what_without_backtrace());
    } catch (const std::exception& error) {
      return refuse(error.what());
    }
    if (shapes_.size() > kMostShapes) {
      finish();
      shapes_.pop_back();
    }
    return shapes_.front().second.get();
  }

  Shape* refuse(const std::string& why) {
    refused_ = true;
    tell_(why.substr(0, why.find('\n')));
    return nullptr;
  }

  std::unique_ptr<Shape> capture_shape(const Values& given, const c10::Stream& current) {
    const c10::InferenceMode no(false);  // what is kept is written to under any mode
    const at::NoGradGuard no_grad;
    const c10::impl::VirtualGuardImpl device(device_.type());
    const c10::Stream side = device.getStreamFromGlobalPool(device_);
    c10::Event fork(device_.type());
    fork.record(current);
    fork.block(side);
    at::Generator generator = at::globalContext().defaultGenerator(device_);
    const at::Tensor drawn = state_of(generator);
    auto shape = std::make_unique<Shape>();
    std::vector<std::pair<at::Tensor, at::Tensor>> kept;  // what a warm-up writes to, and its value
    const auto restore = [&] {
      const c10::StreamGuard on(side);
      for (auto& [tensor, value] : kept) tensor.copy_(value);
      std::lock_guard<std::mutex> hold(generator.mutex());
      generator.set_state(drawn);
    };
    try {
      const c10::StreamGuard on(side);
      for (size_t i = 0; i < given.size(); ++i) {
        shape->inputs.push_back(given[i]);
        if (!given[i].isTensor()) continue;
        const at::Tensor& theirs = given[i].toTensor();
        if (!stays(i, theirs)) {
          const at::Tensor own = twin(theirs);
          shape->inputs.back() = own;
          if (own.numel())
            shape->moved.push_back(
                {i, own.data_ptr(), theirs.data_ptr(), static_cast<size_t>(bytes_of(own))});
        } else if (edge_.written.count(i)) {
          kept.emplace_back(theirs, theirs.clone());
        }
      }
      program_->run(shape->inputs);  // lazy loading and tuning must not meet the capture
      device.synchronizeDevice(device_.index());
      capture(shape->graph.get(), device_, [&] {
        for (Moved& one : shape->moved) one.node = add_copy(side, one.own, one.at, one.bytes);
        shape->outputs = program_->run(shape->inputs);
        note_outputs(*shape);
        for (Moved& one : shape->moved)
          if (edge_.written.count(one.input)) one.back = add_copy(side, one.at, one.own, one.bytes);
        for (Group& one : shape->groups)  // each launch is told where to
          one.node = add_copy(side, one.origin, one.origin, one.bytes);
      });
      spare_copies(*shape, given);
      shape->graph.get().instantiate();
      shape->exec = shape->graph.get().raw_cuda_graph_exec();
    } catch (...) {
      device.synchronizeDevice(device_.index());
      restore();
      fork.record(side);
      fork.block(current);
      throw;
    }
    restore();
    fork.record(side);
    fork.block(current);
    return shape;
  }

  // Let kernels read and write the caller's memory themselves, where all of the graph is kernels that are told
  // each address as an argument, as generated ones are: then those of an input, or of an output, can be found.
  static void spare_copies(Shape& shape, const Values& given) {
    std::vector<void*> copies;
    for (const Moved& one : shape.moved) copies.insert(copies.end(), {one.node, one.back});
    for (const Group& one : shape.groups) copies.push_back(one.node);
    void* const graph = shape.graph.get().raw_cuda_graph();
    try {
      shape.kernels = kernels_of(graph, copies);
    } catch (const Error&) {  // a driver before CUDA 12.4, or kernels that begin before others end
      return;
    }
    for (Moved& one : shape.moved) {
      auto uses = uses_of(shape.kernels, one.own, one.bytes);
      if (one.back || uses.empty() || uses.size() > kFew || !is_aligned(given[one.input].toTensor())) continue;
      take_out(graph, one.node);
      one.uses = std::move(uses);
      one.at = nullptr;  // nobody was told yet
    }
    for (Group& one : shape.groups) {
      // What had that memory before an output did is none of these uses if there is one: the output is written.
      auto uses = uses_of(shape.kernels, one.origin, one.bytes);
      const auto& memory = shape.outputs[one.outputs[0]].toTensor().storage();
      if (uses.size() != 1 || memory.data() != one.origin) continue;
      take_out(graph, one.node);
      one.uses = std::move(uses);
    }
  }

  static std::vector<Use> uses_of(std::vector<Told>& kernels, const void* memory, size_t bytes) {
    std::vector<Use> uses;
    const auto start = reinterpret_cast<uint64_t>(memory);
    for (size_t i = 0; i < kernels.size(); ++i)
      for (size_t j = 0; j < kernels[i].values().size(); ++j)
        if (const uint64_t offset = kernels[i].values()[j] - start; offset < bytes) uses.push_back({i, j, offset});
    return uses;
  }

  // Have the kernels use memory elsewhere from the next `tell` on.
  static void move(Shape& shape, const std::vector<Use>& uses, const void* at, std::set<size_t>& moved) {
    for (const Use& use : uses) {
      shape.kernels[use.kernel].values()[use.argument] = reinterpret_cast<uint64_t>(at) + use.offset;
      moved.insert(use.kernel);
    }
  }

  static at::Tensor state_of(at::Generator& generator) {
    std::lock_guard<std::mutex> hold(generator.mutex());
    return generator.get_state();
  }

  void note_outputs(Shape& shape) const {
    for (size_t i = 0; i < shape.outputs.size(); ++i) {
      if (shape.outputs[i].isList() || shape.outputs[i].isTuple()) throw Error("a result is a list");
      if (!shape.outputs[i].isTensor()) continue;
      const at::Tensor& out = shape.outputs[i].toTensor();
      if (out.layout() != at::kStrided || out.device() != device_)
        throw Error("a result is no dense tensor on " + device_.str());
      const auto of = std::find_if(shape.inputs.begin(), shape.inputs.end(), [&](const c10::IValue& in) {
        return in.isTensor() && same_memory(out, in.toTensor());
      });
      if (of != shape.inputs.end())
        shape.views[i] = of - shape.inputs.begin();
      else if (out.numel() && !edge_.alias_outputs)
        add_to_group(shape, i, out);
    }
    int64_t all = 0;
    for (Group& group : shape.groups) {
      const at::Tensor& first = shape.outputs[group.outputs[0]].toTensor();
      const int64_t size = first.element_size();
      group.origin = static_cast<char*>(first.data_ptr()) - (first.storage_offset() - group.low) * size;
      group.bytes = (group.high - group.low) * size;
      all += group.bytes;
    }
    shape.ahead = all <= kAhead;
  }

  static void add_to_group(Shape& shape, size_t i, const at::Tensor& out) {
    auto group = std::find_if(shape.groups.begin(), shape.groups.end(), [&](const Group& one) {
      return same_memory(shape.outputs[one.outputs[0]].toTensor(), out);
    });
    if (group == shape.groups.end()) group = shape.groups.emplace(group);
    group->outputs.push_back(i);
    group->alike &= same_layout(out, shape.outputs[group->outputs[0]].toTensor());
    group->low = std::min(group->low, out.storage_offset());
    group->high = std::max(group->high, out.storage_offset() + span(out));
  }

  // Outputs of the next launch.
  static Values made(Shape& shape) {
    Values results = shape.outputs;
    for (Group& group : shape.groups) {
      const at::Tensor& first = shape.outputs[group.outputs[0]].toTensor();
      const at::Tensor base =
          group.alike ? at::empty_strided(first.sizes(), first.strides(), first.options())
                      : at::empty_strided({group.high - group.low}, {1}, first.options());
      group.at = base.data_ptr();
      for (size_t i : group.outputs) {
        const at::Tensor& out = shape.outputs[i].toTensor();
        results[i] = group.alike ? base
                                 : base.as_strided(out.sizes(), out.strides(), out.storage_offset() - group.low);
      }
    }
    return results;
  }

  static Values replay(Shape& shape, const Values& given, const c10::Stream& current) {
    const bool inference = c10::InferenceMode::is_enabled();
    Values results = std::move(shape.ready);
    shape.ready.clear();
    if (results.empty() || current.id() != shape.stream || inference != shape.inference) results = made(shape);
    std::set<size_t> told;
    for (const Group& one : shape.groups)
      one.uses.empty() ? redirect(shape.exec, one.node, one.at, one.origin, one.bytes)
                       : move(shape, one.uses, one.at, told);
    for (Moved& one : shape.moved) {
      void* const at = given[one.input].toTensor().data_ptr();
      if (at == one.at) continue;
      if (one.uses.empty()) redirect(shape.exec, one.node, one.own, at, one.bytes);
      if (one.back) redirect(shape.exec, one.back, at, one.own, one.bytes);
      move(shape, one.uses, at, told);
      one.at = at;
    }
    for (const size_t kernel : told) shape.kernels[kernel].tell(shape.exec);
    shape.graph.get().replay();
    for (const auto& [i, source] : shape.views) {  // of what the caller has, not of the graph's copy
      const at::Tensor& out = shape.outputs[i].toTensor();
      const at::Tensor &own = shape.inputs[source].toTensor(), &theirs = given[source].toTensor();
      const int64_t offset = out.storage_offset() - own.storage_offset() + theirs.storage_offset();
      results[i] =
          same_layout(out, own) ? theirs : theirs.as_strided(out.sizes(), out.strides(), offset);
    }
    if (shape.ahead) shape.ready = made(shape);  // beside the device's work
    shape.stream = current.id();
    shape.inference = inference;
    return results;
  }

  std::shared_ptr<Linked> program_;
  c10::Device device_;
  Edge edge_;
  std::function<void(const std::string&)> tell_;
  std::atomic<bool> refused_{false};
  std::mutex lock_;
  std::list<std::pair<Key, std::unique_ptr<Shape>>> shapes_;  // the last used one first
  Key key_;                                                   // of the call under way
};

}  // namespace

bool captures() { return true; }

std::shared_ptr<Linked> captured(
    std::shared_ptr<Linked> program, c10::Device device, Edge edge,
    std::function<void(const std::string&)> refused) {
  return std::make_shared<Captured>(std::move(program), device, std::move(edge), std::move(refused));
}

}  // namespace torchgraft

#endif
