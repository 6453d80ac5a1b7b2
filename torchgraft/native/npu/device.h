// A simulated accelerator: memory that the host cannot reach, streams that are threads, events.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace graft::npu {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// What the environment asks for; read once, when the library is loaded.
struct Settings {
  c10::DeviceIndex devices;  // TORCHGRAFT_NPU_DEVICES
  size_t memory;             // TORCHGRAFT_NPU_MEMORY, bytes of each device
  bool debug;                // TORCHGRAFT_NPU_DEBUG
};
const Settings& settings();

// --- streams ---------------------------------------------------------------------------------

using Task = std::function<void()>;

// A stream: tasks run in order, on a thread of its own. Under an adversary some tasks are held
// back until somebody waits for them, which is the latest that the program permits.
class Queue {
 public:
  Queue(c10::DeviceIndex device, c10::StreamId id) : device_(device), id_(id) {}

  uint64_t push(std::string what, Task task);  // its number; `what` names it in errors
  void demand(uint64_t number);                // let it run, if it was held back
  bool done(uint64_t number);
  void wait(uint64_t number);  // never raises: another stream may be the one that waits
  uint64_t last();
  void wake();
  void stop();
  void join();
  c10::DeviceIndex device() const { return device_; }

 private:
  struct Entry {
    std::string what;
    Task task;
  };
  bool may_run() const;
  void work();

  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  uint64_t pushed_ = 0, finished_ = 0, demanded_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

// A point in a stream's work. An event holds the one that it recorded last.
struct Moment {
  Queue* queue;
  uint64_t number = 0;
  std::atomic<int64_t> nanoseconds{-1};
};

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream next_stream(c10::DeviceIndex device);

Queue& queue_of(const c10::Stream& stream);
Queue& queue_of(c10::DeviceIndex device, c10::StreamId id);
std::shared_ptr<Moment> record(const c10::Stream& stream);
void block(const c10::Stream& stream, std::shared_ptr<Moment> moment);

// Waits on behalf of the host. Both raise what a task of that device raised since the last time.
void synchronize(const c10::Stream& stream);
void synchronize(c10::DeviceIndex device);
void synchronize(const Moment& moment);

void check_device(c10::DeviceIndex device);

// --- memory ----------------------------------------------------------------------------------

// A device pointer points into a range that nobody may read or write. What it stands for lies at a
// fixed distance, in a second range, and only kernels of the device go there: through `shadow`.
// It raises for a pointer that is not device memory; in debug mode, for memory that is free.
void* shadow(const void* device_pointer, size_t bytes);
c10::DeviceIndex device_of(const void* device_pointer);  // raises for a host pointer

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* host_pointer);

}  // namespace graft::npu
