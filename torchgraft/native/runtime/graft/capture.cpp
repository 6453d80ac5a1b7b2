#include "graft/capture.h"

#ifndef GRAFT_CUDA

namespace torchgraft {

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

// A graph of torch's. Its class has members only for some versions of CUDA, so that torch may have made it
// larger than this file sees it: there is room for that.
class Graph {
 public:
  Graph() { new (room_) at::cuda::CUDAGraph(); }
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

// All of that, in one row.
at::Tensor row(const at::Tensor& tensor) {
  return tensor.as_strided({span(tensor)}, {1}, tensor.storage_offset());
}

bool same_memory(const at::Tensor& one, const at::Tensor& two) {
  return one.numel() && two.numel() && one.is_alias_of(two) && one.scalar_type() == two.scalar_type();
}

// Outputs that share memory, copied as one.
struct Group {
  std::vector<size_t> outputs;
  int64_t low = INT64_MAX, high = 0;
};

// The capture of one shape.
struct Shape {
  Graph graph;
  std::vector<at::Tensor> inputs;       // the graph's own; a fixed one is the caller's
  Values outputs;                       // the graph's own
  std::vector<size_t> moved;            // inputs that are copied in
  std::map<size_t, size_t> views;       // outputs that are views of an input
  std::vector<Group> groups;
};

class Captured : public Linked {
 public:
  Captured(std::shared_ptr<Linked> program, c10::Device device, Edge edge,
           std::function<void(const std::string&)> refused)
      : program_(std::move(program)), device_(device), edge_(std::move(edge)),
        tell_(std::move(refused)), end_(device.type()) {}

  ~Captured() override {
    try {
      end_.synchronize();  // memory of a graph that runs must stay
    } catch (const std::exception&) {  // the device is gone, and the graph with it
    }
  }

  Values run(Values inputs) override {
    const c10::OptionalDeviceGuard on(device_);
    const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    if (!refused_ && !is_capturing(current)) {
      std::lock_guard<std::mutex> hold(lock_);
      end_.block(current);  // copies around the graph wait for the call before, whatever its stream
      if (Shape* shape = shape_of(inputs, current)) {
        Values outputs = replay(*shape, inputs);
        end_.record(current);
        return outputs;
      }
    }
    return program_->run(std::move(inputs));
  }

 private:
  using Key = std::vector<int64_t>;

  // Whether the graph works on an input itself: what is between the elements of one that is written is
  // somebody else's, and must not be copied back.
  bool stays(size_t i, const at::Tensor& given) const {
    return edge_.fixed.count(i) || (edge_.written.count(i) && span(given) != given.numel());
  }

  Key key_of(const Values& inputs) const {
    Key key;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& given = inputs[i].toTensor();
      key.insert(key.end(), given.sizes().begin(), given.sizes().end());
      key.insert(key.end(), given.strides().begin(), given.strides().end());
      if (stays(i, given)) key.push_back(reinterpret_cast<int64_t>(given.data_ptr()));
    }
    return key;
  }

  // The graph of these inputs' shapes; null where there can be none.
  Shape* shape_of(const Values& inputs, const c10::Stream& current) {
    for (const c10::IValue& input : inputs)
      if (!input.isTensor() || input.toTensor().device() != device_ ||
          input.toTensor().layout() != at::kStrided)
        return refuse("an input is no dense tensor on " + device_.str());
    const Key key = key_of(inputs);
    for (auto it = shapes_.begin(); it != shapes_.end(); ++it) {
      if (it->first != key) continue;
      shapes_.splice(shapes_.begin(), shapes_, it);
      return shapes_.front().second.get();
    }
    try {
      shapes_.emplace_front(key, capture_shape(inputs, current));
    } catch (const c10::Error& error) {
      return refuse(error.what_without_backtrace());
    } catch (const std::exception& error) {
      return refuse(error.what());
    }
    if (shapes_.size() > kMostShapes) {
      end_.synchronize();
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
        const at::Tensor& theirs = given[i].toTensor();
        const bool stay = stays(i, theirs);
        if (!stay && theirs.numel()) shape->moved.push_back(i);
        shape->inputs.push_back(
            stay ? theirs : row(theirs).clone().as_strided(theirs.sizes(), theirs.strides()));
        if (stay && edge_.written.count(i)) kept.emplace_back(theirs, theirs.clone());
      }
      const auto work = [&] {
        return program_->run(Values(shape->inputs.begin(), shape->inputs.end()));
      };
      work();  // lazy loading and tuning must not meet the capture
      device.synchronizeDevice(device_.index());
      capture(shape->graph.get(), device_, [&] { shape->outputs = work(); });
      note_outputs(*shape);
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
      const auto of = std::find_if(shape.inputs.begin(), shape.inputs.end(), [&](const at::Tensor& in) {
        return same_memory(out, in);
      });
      if (of != shape.inputs.end())
        shape.views[i] = of - shape.inputs.begin();
      else if (out.numel() && !edge_.alias_outputs)
        add_to_group(shape, i, out);
    }
  }

  static void add_to_group(Shape& shape, size_t i, const at::Tensor& out) {
    auto group = std::find_if(shape.groups.begin(), shape.groups.end(), [&](const Group& one) {
      return same_memory(shape.outputs[one.outputs[0]].toTensor(), out);
    });
    if (group == shape.groups.end()) group = shape.groups.emplace(group);
    group->outputs.push_back(i);
    group->low = std::min(group->low, out.storage_offset());
    group->high = std::max(group->high, out.storage_offset() + span(out));
  }

  Values replay(Shape& shape, const Values& given) const {
    for (size_t i : shape.moved) row(shape.inputs[i]).copy_(row(given[i].toTensor()), true);
    shape.graph.get().replay();
    Values results = shape.outputs;
    for (const Group& group : shape.groups) {
      const at::Tensor& first = shape.outputs[group.outputs[0]].toTensor();
      const at::Tensor made = first.as_strided({group.high - group.low}, {1}, group.low).clone();
      for (size_t i : group.outputs) {
        const at::Tensor& out = shape.outputs[i].toTensor();
        results[i] = made.as_strided(out.sizes(), out.strides(), out.storage_offset() - group.low);
      }
    }
    for (size_t i : shape.moved)
      if (edge_.written.count(i)) row(given[i].toTensor()).copy_(row(shape.inputs[i]), true);
    for (const auto& [i, source] : shape.views) {  // of what the caller has, not of the graph's copy
      const at::Tensor& out = shape.outputs[i].toTensor();
      const at::Tensor& theirs = given[source].toTensor();
      const int64_t offset =
          out.storage_offset() - shape.inputs[source].storage_offset() + theirs.storage_offset();
      results[i] = theirs.as_strided(out.sizes(), out.strides(), offset);
    }
    return results;
  }

  std::shared_ptr<Linked> program_;
  c10::Device device_;
  Edge edge_;
  std::function<void(const std::string&)> tell_;
  std::atomic<bool> refused_{false};
  std::mutex lock_;
  c10::Event end_;  // of the last call
  std::list<std::pair<Key, std::unique_ptr<Shape>>> shapes_;  // the last used one first
};

}  // namespace

std::shared_ptr<Linked> captured(
    std::shared_ptr<Linked> program, c10::Device device, Edge edge,
    std::function<void(const std::string&)> refused) {
  return std::make_shared<Captured>(std::move(program), device, std::move(edge), std::move(refused));
}

}  // namespace torchgraft

#endif
