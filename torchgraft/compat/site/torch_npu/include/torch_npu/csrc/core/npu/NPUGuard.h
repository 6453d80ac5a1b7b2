// Guards of the npu: torch's own, for its device type.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace c10_npu {

class NPUGuard {
 public:
  explicit NPUGuard(c10::DeviceIndex device)
      : guard_(c10::Device(c10::DeviceType::PrivateUse1, device)) {}
  explicit NPUGuard(c10::Device device) : guard_(device) {}
  c10::Device current_device() const { return guard_.current_device(); }
  c10::Device original_device() const { return guard_.original_device(); }

 private:
  c10::DeviceGuard guard_;
};

using NPUStreamGuard = c10::StreamGuard;

}  // namespace c10_npu
