#pragma once
#include "torchgraft/npu.h"
