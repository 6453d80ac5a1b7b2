#include "graft/pages.h"

#include <sys/mman.h>

#include <fstream>

namespace torchgraft {
namespace {

constexpr size_t kPage = size_t{2} << 20, kRoom = 32 * kPage, kLeast = size_t{1} << 18, kLine = 64;

bool has_huge() {
  static const bool has = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    std::string setting;
    return std::getline(file, setting) && setting.find("[never]") == std::string::npos;
  }();
  return has;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
      !tensor.is_conj() && !tensor.is_neg() && tensor.is_non_overlapping_and_dense();
}

}  // namespace

at::Tensor Pages::settle(const at::Tensor& tensor) {
  const size_t size = tensor.defined() ? tensor.nbytes() : 0;
  if (size < kLeast || !has_huge() || !is_plain(tensor)) return tensor;
  if (next_ == nullptr || end_ - next_ < static_cast<ptrdiff_t>(size)) {
    // One page more: the first of them begins somewhere in the first that there are.
    const size_t length = std::max(kRoom, size) + kPage;
    void* start = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return tensor;
    madvise(start, length, MADV_HUGEPAGE);
    room_ = std::shared_ptr<void>(start, [length](void* memory) { munmap(memory, length); });
    next_ = static_cast<char*>(start) + (kPage - reinterpret_cast<uintptr_t>(start) % kPage) % kPage;
    end_ = static_cast<char*>(start) + length;
  }
  char* const place = next_;
  next_ += (size + kLine - 1) / kLine * kLine;
  const auto keep = [room = room_](void*) {};
  return at::from_blob(place, tensor.sizes(), tensor.strides(), keep, tensor.options()).copy_(tensor);
}

}  // namespace torchgraft
