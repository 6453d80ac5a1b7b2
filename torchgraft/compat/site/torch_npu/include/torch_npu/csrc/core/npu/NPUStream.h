// Streams of the npu, through the interface that torch has for every device.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "acl/acl_base.h"

namespace c10_npu {

class NPUStream {
 public:
  explicit NPUStream(c10::Stream stream) : stream_(stream) {}
  operator c10::Stream() const { return stream_; }
  c10::Stream unwrap() const { return stream_; }
  c10::StreamId id() const { return stream_.id(); }
  c10::DeviceIndex device_index() const { return stream_.device_index(); }
  c10::Device device() const { return stream_.device(); }
  bool query() const { return guard().queryStream(stream_); }
  void synchronize() const { guard().synchronizeStream(stream_); }
  // A name for the stream, as a pointer. There is nothing behind it.
  aclrtStream stream(bool need_empty = true) const {
    return reinterpret_cast<aclrtStream>(static_cast<uintptr_t>(stream_.id() + 1));
  }
  bool operator==(const NPUStream& other) const { return stream_ == other.stream_; }
  bool operator!=(const NPUStream& other) const { return stream_ != other.stream_; }

  static c10::impl::VirtualGuardImpl guard() {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
  }
  static c10::Device device_of(c10::DeviceIndex index) {
    return index < 0 ? guard().getDevice() : c10::Device(c10::DeviceType::PrivateUse1, index);
  }

 private:
  c10::Stream stream_;
};

inline NPUStream getCurrentNPUStream(c10::DeviceIndex device = -1) {
  return NPUStream(NPUStream::guard().getStream(NPUStream::device_of(device)));
}
inline NPUStream getDefaultNPUStream(c10::DeviceIndex device = -1) {
  return NPUStream(NPUStream::guard().getDefaultStream(NPUStream::device_of(device)));
}
inline NPUStream getStreamFromPool(bool high_priority = false, c10::DeviceIndex device = -1) {
  auto made = NPUStream::guard().getStreamFromGlobalPool(NPUStream::device_of(device), high_priority);
  return NPUStream(made);
}
inline void setCurrentNPUStream(NPUStream stream) { NPUStream::guard().exchangeStream(stream); }

}  // namespace c10_npu
