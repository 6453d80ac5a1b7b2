// What torch asks a device for: guards, hooks, generators.
#include "guard.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <random>
#include <vector>

namespace graft::npu {
namespace {

struct Event {
  std::shared_ptr<Moment> moment;
};

Event* event_of(void* event) { return static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNpu, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kNpu, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < settings().devices) exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return settings().devices; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return next_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return next_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const {  // virtual since torch 2.11
    return &queue_of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Queue& queue = queue_of(stream);
    auto last = queue.last();
    queue.demand(last);  // a program that polls must get there
    return queue.done(last);
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    event_of(*event)->moment = npu::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) npu::block(stream, event_of(event)->moment);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto& moment = event_of(event)->moment;
    moment->queue->demand(moment->number);
    return moment->queue->done(moment->number);
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(*event_of(event)->moment);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before the time between them is asked");
    auto at = [](void* event) {
      int64_t time = event_of(event)->moment->nanoseconds;
      TORCH_CHECK(time >= 0, "both events must be complete before the time between them is asked; ",
                  "synchronize first");
      return static_cast<double>(time);
    };
    return (at(second) - at(first)) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete event_of(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Register {
  Register() { c10::SetAllocator(kNpu, device_allocator()); }
} const registered;

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < settings().devices; ++i) {
      made->push_back(at::make_generator<Generator>(i));
      made->back().seed();
    }
    return made;
  }();
  device = device < 0 ? current_device() : device;
  check_device(device);
  return (*all)[device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return settings().devices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchange_device(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* pointer) const override { return {kNpu, device_of(pointer)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    device = device < 0 ? current_device() : device;
    check_device(device);
    return at::make_generator<Generator>(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize(storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

// The generator that `torch.npu` seeds and saves.
TORCH_LIBRARY_FRAGMENT(torchgraft_npu, m) {
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<c10::DeviceIndex>(device));
  });
}

// --- generators ------------------------------------------------------------------------------

Generator::Generator(c10::DeviceIndex device)
    : c10::GeneratorImpl({kNpu, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Generator::set_current_seed(uint64_t seed) {
  std::lock_guard lock(lock_);
  seed_ = seed;
  offset_ = 0;
}

void Generator::set_offset(uint64_t offset) {
  std::lock_guard lock(lock_);
  offset_ = offset;
}

uint64_t Generator::get_offset() const {
  std::lock_guard lock(lock_);
  return offset_;
}

uint64_t Generator::current_seed() const {
  std::lock_guard lock(lock_);
  return seed_;
}

uint64_t Generator::seed() {
  std::random_device source;
  uint64_t made = (uint64_t{source()} << 32 | source()) & 0x1fffffffffffff;
  set_current_seed(made);
  return made;
}

uint64_t Generator::draw() {
  std::lock_guard lock(lock_);
  std::seed_seq mixed{seed_ & 0xffffffff, seed_ >> 32, offset_ & 0xffffffff, offset_ >> 32};
  ++offset_;
  uint32_t made[2];
  mixed.generate(made, made + 2);
  return uint64_t{made[0]} << 32 | made[1];
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.device().is_cpu() && state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                  state.is_contiguous(),
              "the state of an npu generator is 16 bytes on the CPU");
  std::lock_guard lock(lock_);
  auto bytes = static_cast<const uint8_t*>(state.data());
  std::memcpy(&seed_, bytes, 8);
  std::memcpy(&offset_, bytes + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  auto state = at::detail::empty_cpu({16}, at::kByte);
  std::lock_guard lock(lock_);
  auto bytes = static_cast<uint8_t*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, 8);
  std::memcpy(bytes + 8, &offset_, 8);
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* made = new Generator(device().index());
  made->seed_ = current_seed();
  made->offset_ = get_offset();
  return made;
}

uint64_t draw_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  const at::Generator& from =
      given.has_value() && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(from.device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
              from.device().type(), "'");
  return static_cast<Generator*>(from.unsafeGetGeneratorImpl())->draw();
}

}  // namespace graft::npu
