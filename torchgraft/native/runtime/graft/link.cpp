// The executor: a plan walked by the caller, by threads, or onto the streams of a device.
#include "graft/link.h"

#include <unistd.h>

#include <deque>
#include <set>

#include <ATen/ThreadLocalState.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "graft/action.h"
#include "graft/cuda.h"

namespace torchgraft {
namespace {

// --- Worker threads: a stream of the host ---

class Worker {
 public:
  Worker() : thread_([this] { loop(); }) {}
  ~Worker() {
    submit(nullptr);
    thread_.join();
  }
  void submit(std::function<void()> job) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      jobs_.push_back(std::move(job));
    }
    ready_.notify_one();
  }

 private:
  void loop() {
    while (true) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> hold(lock_);
        ready_.wait(hold, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      if (!job) return;
      job();
    }
  }
  std::mutex lock_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_;
  std::thread thread_;
};

// A worker for each side stream. A process that is forked has none of the threads of the first one:
// it leaves these alone, and begins its own.
struct Crew {
  explicit Crew(const std::set<std::string>& streams) : process(getpid()) {
    for (const std::string& name : streams) workers[name] = std::make_unique<Worker>();
  }
  ~Crew() {
    if (process == getpid()) return;
    for (auto& [name, worker] : workers) static_cast<void>(worker.release());
  }
  const pid_t process;
  std::mutex order;  // every worker sees calls in one order
  std::map<std::string, std::unique_ptr<Worker>> workers;
};

class Runs : public Linked {
 public:
  Runs(const Part& part, const Values& values,
       const std::vector<std::shared_ptr<Linked>>& programs, c10::Device device)
      : plan_(part.plan), device_(device) {
    Callees callees;
    for (const auto& [buffer, name] : plan_.constants) {
      const auto found = part.constants.find(name);
      if (found == part.constants.end()) bad("nothing says what constant " + quote(name) + " is");
      const Constant& constant = found->second;
      if (constant.kind == Constant::kValue)
        constants_.emplace_back(buffer, values.at(constant.index));
      else if (constant.kind == Constant::kProgram)
        callees.branches[buffer] = {programs.at(constant.index), constant.single, constant.dense};
      else
        callees.operators[buffer] = constant.callee;
    }
    for (const Step& step : plan_.steps) {
      streams_.insert(step.stream);
      if (step.kind != Step::kLaunch) {
        actions_.push_back(nullptr);
        continue;
      }
      const auto found = part.kernels.find(step.name);
      if (found == part.kernels.end()) bad("nothing says what " + quote(step.name) + " is");
      const Kernel& kernel = found->second;
      actions_.push_back(action(step, kernel, values, callees));
    }
    streams_.erase(kMain);
    if (streams_.empty()) {
      const auto launches = std::count_if(
          plan_.steps.begin(), plan_.steps.end(), [](const Step& s) { return s.kind == Step::kLaunch; });
      for (const auto& action : actions_)
        if (const auto* region = dynamic_cast<const Region*>(action.get());
            region && launches == 1 && region->is_all_of(plan_))
          only_ = region;
      return;
    }
    prove(plan_);
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      const Step& step = plan_.steps[i];
      by_stream_[step.stream].push_back(i);
      if (step.kind == Step::kRecord || step.kind == Step::kWait) events_.emplace(step.name, events_.size());
    }
    if (device_.type() == c10::kCPU) {
      crew_ = std::make_shared<Crew>(streams_);
      return;
    }
    const c10::impl::VirtualGuardImpl guard(device_.type());
    for (const std::string& name : streams_) own_.emplace(name, guard.getStreamFromGlobalPool(device_));
    for (size_t i = 0; i <= events_.size(); ++i) recorded_.emplace_back(device_.type());
    note_owners();
  }

  Values run(Values inputs) override {
    if (inputs.size() != plan_.inputs.size())
      throw Error("a program takes " + std::to_string(plan_.inputs.size()) + " values, got " +
                  std::to_string(inputs.size()));
    c10::OptionalDeviceGuard on;  // generated code reads the current stream of the current device
    if (device_.type() != c10::kCPU) on.reset_device(device_);
    if (only_) return only_->call(std::move(inputs));
    Frame frame(plan_.names.size());
    for (size_t i = 0; i < inputs.size(); ++i) frame.values[plan_.inputs[i]] = std::move(inputs[i]);
    for (const auto& [buffer, value] : constants_) frame.values[buffer] = value;
    if (streams_.empty())
      for (size_t i = 0; i < plan_.steps.size(); ++i) plain_step(frame, i);
    else if (device_.type() == c10::kCPU)
      threaded(frame);
    else
      on_device(frame);
    Values outputs;
    outputs.reserve(plan_.outputs.size());
    for (const Value& out : plan_.outputs) outputs.push_back(frame.fill(out));
    return outputs;
  }

  const Region* region() const override { return device_.type() == c10::kCPU ? only_ : nullptr; }

 private:
  static std::unique_ptr<Action> action(
      const Step& step, const Kernel& kernel, const Values& values, const Callees& callees) {
    if (kernel.kind == Kernel::kLibrary) return call_region(step, kernel, values);
    if (kernel.kind == Kernel::kOp) return call_operator(step, kernel);
    if (kernel.kind == Kernel::kBuiltin) return call_builtin(step, kernel);
    if (kernel.name == "auto_functionalized_v2") return call_mutation(step, callees);
    return call_control(step, kernel, callees);
  }

  void plain_step(Frame& frame, size_t i) const {
    const Step& step = plan_.steps[i];
    if (step.kind == Step::kLaunch) actions_[i]->run(frame);
    else if (step.kind == Step::kFree) frame.values[step.buffer] = {};
  }

  // One call of several streams: its events, and who is done.
  struct Threads {
    explicit Threads(size_t events) : reached(events, false) {}
    std::mutex lock;
    std::condition_variable moved;
    std::vector<bool> reached;
    size_t running = 0;
    std::exception_ptr error;
  };

  void walk(const std::vector<size_t>& steps, Frame& frame, Threads& call) const {
    try {
      for (size_t i : steps) {
        const Step& step = plan_.steps[i];
        if (step.kind == Step::kRecord) {
          std::lock_guard<std::mutex> hold(call.lock);
          call.reached[events_.at(step.name)] = true;
          call.moved.notify_all();
        } else if (step.kind == Step::kWait) {
          std::unique_lock<std::mutex> hold(call.lock);
          const size_t event = events_.at(step.name);
          call.moved.wait(hold, [&] { return call.reached[event] || call.error; });
          if (call.error) return;
        } else {
          plain_step(frame, i);
        }
      }
    } catch (...) {
      std::lock_guard<std::mutex> hold(call.lock);
      if (!call.error) call.error = std::current_exception();
      call.moved.notify_all();
    }
  }

  std::shared_ptr<Crew> crew() {
    auto found = std::atomic_load(&crew_);
    if (found->process == getpid()) return found;
    auto made = std::make_shared<Crew>(streams_);
    return std::atomic_compare_exchange_strong(&crew_, &found, made) ? made : found;
  }

  void threaded(Frame& frame) {
    const auto crew = this->crew();
    Threads call(events_.size());
    call.running = crew->workers.size();
    {
      std::lock_guard<std::mutex> hold(crew->order);
      for (const auto& [name, worker] : crew->workers) {
        const std::vector<size_t>& steps = by_stream_.at(name);
        worker->submit([this, &steps, &frame, &call, state = at::ThreadLocalState()] {
          {
            const at::ThreadLocalStateGuard as_the_caller(state);  // inference mode and the like
            walk(steps, frame, call);
          }
          std::lock_guard<std::mutex> done(call.lock);
          --call.running;
          call.moved.notify_all();
        });
      }
    }
    if (const auto found = by_stream_.find(kMain); found != by_stream_.end())
      walk(found->second, frame, call);
    std::unique_lock<std::mutex> hold(call.lock);
    call.moved.wait(hold, [&] { return call.running == 0; });
    if (call.error) std::rethrow_exception(call.error);
  }

  // Which buffers outlive the steps of the stream that made them, and which of those are results.
  void note_owners() {
    std::map<int64_t, int64_t> roots;
    for (const auto& [view, base] : plan_.shared) roots[view] = roots.count(base) ? roots[base] : base;
    std::map<int64_t, std::string> made_on;
    for (const Step& step : plan_.steps) {
      if (step.kind == Step::kLaunch)
        for (int64_t out : step.outputs) made_on[out] = step.stream;
      if (step.kind != Step::kFree) continue;
      const auto root = roots.find(step.buffer);
      const auto maker = made_on.find(root == roots.end() ? step.buffer : root->second);
      if (maker != made_on.end() && maker->second != kMain && maker->second != step.stream)
        late_.insert(step.buffer);
    }
    for (const Value& out : plan_.outputs)
      out.each_buffer([&](int64_t buffer) {
        const auto maker = made_on.find(buffer);
        if (maker != made_on.end() && maker->second != kMain) foreign_.insert(buffer);
      });
  }

  // Calls are enqueued one after the other. A device's allocator gives freed memory to the stream
  // that it was made on, which others in the process may use too: what outlives the steps of its
  // stream is kept until that stream waits for the end of the call.
  void on_device(Frame& frame) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const c10::Stream current = guard.getStream(device_);
    const bool capturing = is_capturing(current);
    std::lock_guard<std::mutex> hold(order_);
    c10::Event& end = recorded_.back();
    const auto join = [&] {
      end.record(current);
      for (const auto& [name, stream] : own_) end.block(stream);
    };
    try {
      enqueue(frame, current);
    } catch (...) {  // the caller's stream must not pass what is under way
      if (capturing) throw;
      for (const auto& [name, stream] : own_) {
        end.record(stream);
        end.block(current);
      }
      join();
      throw;
    }
    if (capturing) return;
    join();
    for (int64_t buffer : foreign_)  // the caller's to free
      if (frame.values[buffer].isTensor()) frame.values[buffer].toTensor().record_stream(current);
  }

  void enqueue(Frame& frame, const c10::Stream& current) {
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      const Step& step = plan_.steps[i];
      const auto found = own_.find(step.stream);
      const c10::Stream stream = found == own_.end() ? current : found->second;
      if (step.kind == Step::kRecord) {
        recorded_[events_.at(step.name)].record(stream);
      } else if (step.kind == Step::kWait) {
        recorded_[events_.at(step.name)].block(stream);
      } else if (step.kind == Step::kLaunch || !late_.count(step.buffer)) {
        const c10::StreamGuard on(stream);
        plain_step(frame, i);
      }
    }
  }

  Plan plan_;
  c10::Device device_;
  std::vector<std::unique_ptr<Action>> actions_;
  const Region* only_ = nullptr;  // where the plan is one call
  std::vector<std::pair<int64_t, c10::IValue>> constants_;
  std::set<std::string> streams_;
  std::map<std::string, std::vector<size_t>> by_stream_;
  std::map<std::string, size_t> events_;
  std::mutex order_;  // on a device: one call enqueues at a time
  std::map<std::string, c10::Stream> own_;
  std::vector<c10::Event> recorded_;  // and its events; the last is the end of a call
  std::set<int64_t> late_, foreign_;
  std::shared_ptr<Crew> crew_;  // last: they end before what they use
};

}  // namespace

std::shared_ptr<Linked> link(
    const Part& part, const Values& values, const std::vector<std::shared_ptr<Linked>>& programs,
    c10::Device device) {
  return std::make_shared<Runs>(part, values, programs, device);
}

}  // namespace torchgraft
