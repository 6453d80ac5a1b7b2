// Memory for constants that calls read from end to end; the twin of run/pages.py.
#pragma once

#include <ATen/ATen.h>

namespace torchgraft {

// Huge pages for the constants of one program, one behind the other. They are given back when the
// last tensor in them is gone.
class Pages {
 public:
  // A copy in huge pages, laid out alike. The tensor itself where that is not for it: it is small,
  // has gaps, or is not in the processor's memory; or there are no such pages.
  at::Tensor settle(const at::Tensor& tensor);

 private:
  std::shared_ptr<void> room_;
  char* next_ = nullptr;
  char* end_ = nullptr;
};

}  // namespace torchgraft
