#include "device.h"

#include <c10/util/Exception.h>

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <vector>

// Resolved where a Python interpreter is in the process, null elsewhere.
extern "C" {
__attribute__((weak)) int Py_IsInitialized(void);
__attribute__((weak)) int PyGILState_Check(void);
__attribute__((weak)) void* PyEval_SaveThread(void);
__attribute__((weak)) void PyEval_RestoreThread(void*);
}

namespace graft::npu {
namespace {

constexpr c10::StreamId kPool = 32;  // streams of a device besides the default one

// A kernel in Python, on a stream's thread, needs the lock that a waiting caller may hold.
class WithoutPython {
 public:
  WithoutPython() {
    if (Py_IsInitialized && Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutPython() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  void* state_ = nullptr;
};

int64_t number_of(const char* variable, int64_t otherwise, int64_t least, int64_t most) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  int64_t value = std::strtoll(text, &end, 10);
  TORCH_CHECK_VALUE(!*end && value >= least && value <= most, variable, " is '", text,
                    "'; it must be an integer from ", least, " to ", most, ".");
  return value;
}

struct Device {
  std::array<std::unique_ptr<Queue>, kPool + 1> queues;
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;  // of a task; raised at the next wait of the host
};

std::vector<std::unique_ptr<Device>>& devices() {
  static auto* all = [] {  // leaked: threads use it until the process ends
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (c10::DeviceIndex i = 0; i < settings().devices; ++i) {
      made->push_back(std::make_unique<Device>());
      for (c10::StreamId id = 0; id <= kPool; ++id) {
        made->back()->queues[id] = std::make_unique<Queue>(i, id);
      }
    }
    return made;
  }();
  return *all;
}

std::atomic<int64_t> adversary{-1};  // its seed; -1: none
std::atomic<bool> forked{false};

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

thread_local c10::DeviceIndex device_now = 0;
thread_local std::vector<c10::StreamId> streams_now;

void raise_failure(c10::DeviceIndex index) {
  Device& device = *devices()[index];
  std::exception_ptr failure;
  {
    std::lock_guard lock(device.mutex);
    std::swap(failure, device.failure);
  }
  if (failure) std::rethrow_exception(failure);
}

void keep_failure(c10::DeviceIndex index, c10::StreamId id, const std::string& what,
                  const std::string& said) {
  Device& device = *devices()[index];
  std::lock_guard lock(device.mutex);
  if (device.failure) return;  // the first one is the cause
  try {
    TORCH_CHECK(false, what, " failed on npu:", int(index), ", stream ", id, ", where it ran after ",
                "the call had returned: ", said);
  } catch (...) {
    device.failure = std::current_exception();
  }
}

}  // namespace

const Settings& settings() {
  static const Settings read = [] {
    int64_t host = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    adversary = number_of("TORCHGRAFT_NPU_ADVERSARY", -1, 0, INT64_MAX);
    return Settings{
        static_cast<c10::DeviceIndex>(number_of("TORCHGRAFT_NPU_DEVICES", 1, 1, 64)),
        static_cast<size_t>(number_of("TORCHGRAFT_NPU_MEMORY", host, 1 << 20, int64_t{1} << 44)),
        number_of("TORCHGRAFT_NPU_DEBUG", 0, 0, 1) != 0};
  }();
  return read;
}

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < settings().devices, "there is no npu:", int(device),
              "; this process simulates ", int(settings().devices),
              " (set TORCHGRAFT_NPU_DEVICES before torch_npu is imported)");
}

// --- a queue ---------------------------------------------------------------------------------

uint64_t Queue::push(std::string what, Task task) {
  TORCH_CHECK(!forked, "the npu was used before this process was forked, and cannot be used in the ",
              "child. Start processes with the 'spawn' method.");
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  entries_.push_back({std::move(what), std::move(task)});
  changed_.notify_all();
  return ++pushed_;
}

bool Queue::may_run() const {
  if (entries_.empty()) return false;
  int64_t seed = adversary;
  if (seed < 0 || finished_ < demanded_) return true;
  uint64_t place = mix(uint64_t(device_) << 32 | uint64_t(id_)) + (finished_ >> 3);
  return mix(mix(uint64_t(seed)) ^ place) & 1;
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || may_run(); });
    if (stopping_) return;
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    try {
      device_now = device_;
      entry.task();
    } catch (const c10::Error& error) {
      keep_failure(device_, id_, entry.what, error.what_without_backtrace());
    } catch (const std::exception& error) {
      keep_failure(device_, id_, entry.what, error.what());
    }
    entry.task = nullptr;  // what it held may free memory: not under the lock
    lock.lock();
    ++finished_;
    changed_.notify_all();
  }
}

void Queue::demand(uint64_t number) {
  std::lock_guard lock(mutex_);
  if (number > demanded_) demanded_ = number;
  changed_.notify_all();
}

bool Queue::done(uint64_t number) {
  std::lock_guard lock(mutex_);
  return finished_ >= number;
}

void Queue::wait(uint64_t number) {
  demand(number);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopping_ || finished_ >= number; });
}

uint64_t Queue::last() {
  std::lock_guard lock(mutex_);
  return pushed_;
}

void Queue::wake() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Queue::stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

void Queue::join() {
  if (thread_.joinable()) thread_.join();
}

// --- streams and events ----------------------------------------------------------------------

c10::DeviceIndex current_device() { return device_now; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  check_device(device);
  return std::exchange(device_now, device);
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, {kNpu, device}, 0);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  check_device(device);
  bool set = size_t(device) < streams_now.size();
  return c10::Stream(c10::Stream::UNSAFE, {kNpu, device}, set ? streams_now[device] : 0);
}

c10::Stream exchange_stream(c10::Stream stream) {
  c10::Stream before = current_stream(stream.device_index());
  queue_of(stream);  // raises where there is no such stream
  streams_now.resize(settings().devices, 0);
  streams_now[stream.device_index()] = stream.id();
  return before;
}

c10::Stream next_stream(c10::DeviceIndex device) {
  check_device(device);
  c10::StreamId id = 1 + devices()[device]->next++ % kPool;
  return c10::Stream(c10::Stream::UNSAFE, {kNpu, device}, id);
}

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id) {
  check_device(device);
  TORCH_CHECK(id >= 0 && id <= kPool, "npu:", int(device), " has no stream ", id);
  return *devices()[device]->queues[id];
}

Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

std::shared_ptr<Moment> record(const c10::Stream& stream) {
  auto moment = std::make_shared<Moment>();
  moment->queue = &queue_of(stream);
  moment->number = moment->queue->push("event record", [moment] {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    moment->nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  });
  return moment;
}

void block(const c10::Stream& stream, std::shared_ptr<Moment> moment) {
  Queue& queue = queue_of(stream);
  if (&queue == moment->queue) return;  // a stream is in order with itself
  queue.push("event wait", [moment] { moment->queue->wait(moment->number); });
}

void synchronize(const c10::Stream& stream) {
  {
    WithoutPython released;
    Queue& queue = queue_of(stream);
    queue.wait(queue.last());
  }
  raise_failure(stream.device_index());
}

void synchronize(c10::DeviceIndex device) {
  check_device(device);
  {
    WithoutPython released;
    auto& queues = devices()[device]->queues;
    int64_t seed = adversary;
    if (seed < 0) {
      for (auto& queue : queues) queue->demand(queue->last());
    }
    // Under an adversary one after the other, from a place that the seed chooses.
    size_t first = seed < 0 ? 0 : mix(uint64_t(seed)) & 1 ? 0 : 1 + mix(~uint64_t(seed)) % kPool;
    for (size_t i = 0; i < queues.size(); ++i) {
      Queue& queue = *queues[(first + i) % queues.size()];
      queue.wait(queue.last());
    }
  }
  raise_failure(device);
}

void synchronize(const Moment& moment) {
  {
    WithoutPython released;
    moment.queue->wait(moment.number);
  }
  raise_failure(moment.queue->device());
}

}  // namespace graft::npu

// --- what Python calls, through ctypes --------------------------------------------------------

extern "C" {

void graft_npu_set_adversary(int64_t seed) {
  graft::npu::adversary = seed;
  for (auto& device : graft::npu::devices()) {
    for (auto& queue : device->queues) queue->wake();
  }
}

int64_t graft_npu_adversary() { return graft::npu::adversary; }

int graft_npu_device_count() { return graft::npu::settings().devices; }

bool graft_npu_forked() { return graft::npu::forked; }

// Ends the threads of the streams: what has not begun is not run.
void graft_npu_stop() {
  if (graft::npu::forked) return;
  for (auto& device : graft::npu::devices()) {
    for (auto& queue : device->queues) queue->stop();  // all, since one may wait for another
    for (auto& queue : device->queues) queue->join();
  }
}
}
