#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

namespace graft::npu {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kSmall = 512, kLarge = size_t{2} << 20;

size_t round_up(size_t bytes) {
  size_t step = bytes < kLarge ? kSmall : kLarge;
  return (bytes + step - 1) / step * step;
}

// The address space of one device: `base` is what tensors see and nobody may touch, `host` is what
// kernels of the device use.
struct Arena {
  explicit Arena(size_t size) : size(size) {
    auto reserve = [&](int protection) {
      int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      void* at = mmap(nullptr, size, protection, flags, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "no address space for an npu with ", size,
                  " bytes of memory; set TORCHGRAFT_NPU_MEMORY to less");
      return static_cast<char*>(at);
    };
    base = reserve(PROT_NONE);
    host = reserve(PROT_READ | PROT_WRITE);
    free[0] = size;
  }

  bool has(const void* pointer) const {
    auto at = static_cast<const char*>(pointer);
    return at >= base && at < base + size;
  }

  // Offset of `bytes` that nobody has, or `size`.
  size_t take(size_t bytes) {
    for (auto it = free.begin(); it != free.end(); ++it) {
      auto [offset, room] = *it;
      if (room < bytes) continue;
      free.erase(it);
      if (room > bytes) free[offset + bytes] = room - bytes;
      return offset;
    }
    return size;
  }

  void give(size_t offset, size_t bytes) {
    long page = sysconf(_SC_PAGESIZE);
    size_t first = (offset + page - 1) / page * page, last = (offset + bytes) / page * page;
    if (last > first) madvise(host + first, last - first, MADV_DONTNEED);
    auto next = free.emplace(offset, bytes).first;
    if (auto after = std::next(next); after != free.end() && offset + bytes == after->first) {
      next->second += after->second;
      free.erase(after);
    }
    if (next == free.begin()) return;
    if (auto before = std::prev(next); before->first + before->second == offset) {
      before->second += next->second;
      free.erase(next);
    }
  }

  const size_t size;
  char* base;
  char* host;
  std::map<size_t, size_t> free;  // offset to size; neighbours are joined
};

std::vector<Arena>& arenas() {
  static auto* all = [] {
    auto* made = new std::vector<Arena>;
    for (int i = 0; i < settings().devices; ++i) made->emplace_back(settings().memory);
    return made;
  }();
  return *all;
}

struct Block {
  size_t offset, size, requested;
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::set<c10::StreamId> used_on;  // other streams, by record_stream
};

struct Pending {
  Block* block;
  std::vector<std::shared_ptr<Moment>> until;
};

// Memory is given again to the stream that freed it at once, since that stream is in order, and
// after `record_stream` only when the other stream is done: the rules of real accelerators.
class Memory final : public c10::DeviceAllocator {
 public:
  Memory() : pools_(settings().devices), stats_(settings().devices) { arenas(); }

  c10::DataPtr allocate(size_t bytes) override {
    c10::DeviceIndex device = current_device();
    c10::Device at(kNpu, device);
    if (bytes == 0) return {nullptr, nullptr, &Memory::release, at};
    Block* block = take(device, current_stream(device).id(), bytes);
    return {arenas()[device].base + block->offset, block, &Memory::release, at};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    void* target = shadow(to, bytes);
    const void* source = shadow(from, bytes);
    auto& queue = queue_of(current_stream(device_of(to)));
    queue.push("copy", [=] { std::memcpy(target, source, bytes); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (c10::DeviceIndex i = 0; i < settings().devices; ++i) {
      synchronize(i);  // what is freed may still be in use on its stream
      std::lock_guard lock(mutex_);
      drop(i);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto block = static_cast<Block*>(pointer.get_context());
    if (!block || pointer.get_deleter() != &Memory::release) return;
    std::lock_guard lock(mutex_);
    if (stream.id() != block->stream) block->used_on.insert(stream.id());
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard lock(mutex_);
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // virtual since torch 2.10
    auto reserved = getDeviceStats(device).reserved_bytes[0].current;
    return {settings().memory - reserved, settings().memory};
  }

  // Whether these bytes are somebody's.
  bool live(c10::DeviceIndex device, size_t offset, size_t bytes) {
    std::lock_guard lock(mutex_);
    auto it = live_.upper_bound({device, offset});
    if (it == live_.begin()) return false;
    const Block& block = *std::prev(it)->second;
    return block.device == device && offset + bytes <= block.offset + block.size;
  }

 private:
  static Memory& self() { return *static_cast<Memory*>(device_allocator()); }

  static void release(void* context) {
    if (context) self().free(static_cast<Block*>(context));
  }

  template <class F>
  void each(c10::DeviceIndex device, F reset) {
    check_device(device);
    std::lock_guard lock(mutex_);
    Stats& all = stats_[device];
    for (auto* stats : {&all.allocation, &all.segment, &all.active, &all.allocated_bytes,
                        &all.reserved_bytes, &all.active_bytes, &all.requested_bytes}) {
      reset((*stats)[0]);
    }
  }

  Block* take(c10::DeviceIndex device, c10::StreamId stream, size_t requested) {
    size_t size = round_up(requested);
    std::unique_lock lock(mutex_);
    settle(device);
    Block* block = reuse(device, stream, size);
    if (!block) block = carve(device, stream, size);
    if (!block) {  // what other streams have freed, and what is still waiting
      stats_[device].num_alloc_retries++;
      lock.unlock();
      synchronize(device);
      lock.lock();
      settle(device);
      drop(device);
      block = carve(device, stream, size);
    }
    Stats& stats = stats_[device];
    if (!block) {
      stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "npu:", int(device), " out of memory: ", size,
                       " bytes wanted, ", stats.allocated_bytes[0].current, " of ",
                       settings().memory, " in use (TORCHGRAFT_NPU_MEMORY)");
    }
    block->requested = requested;
    live_[{device, block->offset}] = block;
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    stats.allocated_bytes[0].increase(block->size);
    stats.active_bytes[0].increase(block->size);
    stats.requested_bytes[0].increase(requested);
    return block;
  }

  void free(Block* block) {
    std::lock_guard lock(mutex_);
    Stats& stats = stats_[block->device];
    stats.allocation[0].decrease(1);
    stats.allocated_bytes[0].decrease(block->size);
    stats.requested_bytes[0].decrease(block->requested);
    live_.erase({block->device, block->offset});
    Pending pending{block, {}};
    for (c10::StreamId id : block->used_on) {
      pending.until.push_back(
          record(c10::Stream(c10::Stream::UNSAFE, {kNpu, block->device}, id)));
    }
    block->used_on.clear();
    if (pending.until.empty()) return recycle(block);
    pending_.push_back(std::move(pending));
  }

  void recycle(Block* block) {
    Stats& stats = stats_[block->device];
    stats.active[0].decrease(1);
    stats.active_bytes[0].decrease(block->size);
    if (settings().debug) {  // who reads it now reads NaN
      void* at = arenas()[block->device].host + block->offset;
      size_t size = block->size;
      queue_of(block->device, block->stream).push("poison", [=] { std::memset(at, 0xff, size); });
    }
    pools_[block->device][block->stream].emplace(block->size, block);
  }

  void settle(c10::DeviceIndex device) {
    auto finished = [](const auto& moment) { return moment->queue->done(moment->number); };
    for (size_t i = 0; i < pending_.size();) {
      Pending& one = pending_[i];
      bool done = one.block->device == device;
      for (const auto& moment : one.until) done = done && finished(moment);
      if (!done) {
        ++i;
        continue;
      }
      recycle(one.block);
      one = std::move(pending_.back());
      pending_.pop_back();
    }
  }

  Block* reuse(c10::DeviceIndex device, c10::StreamId stream, size_t size) {
    auto& pool = pools_[device][stream];
    auto it = pool.lower_bound(size);
    if (it == pool.end() || it->first > 2 * size) return nullptr;
    Block* block = it->second;
    pool.erase(it);
    return block;
  }

  Block* carve(c10::DeviceIndex device, c10::StreamId stream, size_t size) {
    size_t offset = arenas()[device].take(size);
    if (offset == arenas()[device].size) return nullptr;
    Stats& stats = stats_[device];
    stats.segment[0].increase(1);
    stats.num_device_alloc++;
    stats.reserved_bytes[0].increase(size);
    return new Block{offset, size, 0, device, stream, {}};
  }

  void drop(c10::DeviceIndex device) {
    Stats& stats = stats_[device];
    for (auto& [stream, pool] : pools_[device]) {
      for (auto& [size, block] : pool) {
        arenas()[device].give(block->offset, size);
        stats.segment[0].decrease(1);
        stats.num_device_free++;
        stats.reserved_bytes[0].decrease(size);
        delete block;
      }
    }
    pools_[device].clear();
  }

  std::mutex mutex_;
  std::vector<std::map<c10::StreamId, std::multimap<size_t, Block*>>> pools_;
  std::vector<Stats> stats_;
  std::map<std::pair<c10::DeviceIndex, size_t>, Block*> live_;
  std::vector<Pending> pending_;
};

// Host memory that copies may read and write after they have returned.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device at(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &Pinned::release, at};
    void* pointer = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK_WITH(OutOfMemoryError, pointer, "no ", bytes, " bytes of pinned memory");
    std::lock_guard lock(mutex_);
    ranges_[static_cast<char*>(pointer)] = bytes;
    return {pointer, pointer, &Pinned::release, at};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool has(const void* pointer) {
    std::lock_guard lock(mutex_);
    auto at = static_cast<char*>(const_cast<void*>(pointer));
    auto it = ranges_.upper_bound(at);
    return it != ranges_.begin() && at < std::prev(it)->first + std::prev(it)->second;
  }

 private:
  static void release(void* pointer) {
    if (!pointer) return;
    auto& self = *static_cast<Pinned*>(pinned_allocator());
    {
      std::lock_guard lock(self.mutex_);
      self.ranges_.erase(static_cast<char*>(pointer));
    }
    std::free(pointer);
  }

  std::mutex mutex_;
  std::map<char*, size_t> ranges_;
};

// --- the host at a device address --------------------------------------------------------------

struct sigaction before_us;

void on_fault(int signal, siginfo_t* info, void*) {
  for (const Arena& arena : arenas()) {
    if (!arena.has(info->si_addr)) continue;
    static const char said[] =
        "torchgraft: host code read or wrote memory of an npu. Copy the tensor to the CPU first, "
        "or compute with operators; a data_ptr() of the device is for its kernels only.\n";
    [[maybe_unused]] auto written = ::write(STDERR_FILENO, said, sizeof(said) - 1);
  }
  sigaction(signal, &before_us, nullptr);  // the access faults again, with the handler before us
}

}  // namespace

c10::Allocator* device_allocator() {
  static auto* one = new Memory;
  return one;
}

c10::Allocator* pinned_allocator() {
  static auto* one = new Pinned;
  return one;
}

bool is_pinned(const void* pointer) {
  return static_cast<Pinned*>(pinned_allocator())->has(pointer);
}

c10::DeviceIndex device_of(const void* pointer) {
  for (size_t i = 0; i < arenas().size(); ++i) {
    if (arenas()[i].has(pointer)) return static_cast<c10::DeviceIndex>(i);
  }
  TORCH_CHECK(false, "the pointer ", pointer, " is not memory of an npu", 
              is_pinned(pointer) ? " but pinned memory of the host" : " but of the host",
              ": a tensor on the npu was made from it. Make the tensor on the CPU and copy it.");
}

void* shadow(const void* pointer, size_t bytes) {
  if (!pointer) return nullptr;
  c10::DeviceIndex device = device_of(pointer);
  Arena& arena = arenas()[device];
  size_t offset = static_cast<const char*>(pointer) - arena.base;
  if (settings().debug) {
    TORCH_CHECK(static_cast<Memory*>(device_allocator())->live(device, offset, bytes), "the ", bytes,
                " bytes at ", pointer, " on npu:", int(device), " are not allocated, or not any more");
  }
  return arena.host + offset;
}

}  // namespace graft::npu

extern "C" {

void graft_npu_empty_cache() {
  static_cast<c10::DeviceAllocator*>(graft::npu::device_allocator())->emptyCache();
}

// The device, ready; or what is wrong with the settings. From here on, host code that touches
// device memory is told so before the process ends as it would.
const char* graft_npu_open() noexcept {
  static std::string said;
  try {
    graft::npu::arenas();
    struct sigaction action = {};
    action.sa_sigaction = graft::npu::on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &graft::npu::before_us);
    return nullptr;
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
    return said.c_str();
  }
}
}
