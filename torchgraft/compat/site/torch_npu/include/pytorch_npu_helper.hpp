// EXEC_NPU_CMD and the names that kernels written for it use.
#pragma once
#include <torch/extension.h>

#include "torchgraft/npu.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
