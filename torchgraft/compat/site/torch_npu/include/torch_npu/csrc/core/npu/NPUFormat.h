// Formats of tensors. Off the NPU there is the plain one.
#pragma once

#include <ATen/core/Tensor.h>

#include "acl/acl_base.h"

namespace at_npu {
namespace native {

inline int64_t get_npu_format(const at::Tensor&) { return ACL_FORMAT_ND; }

}  // namespace native
}  // namespace at_npu
