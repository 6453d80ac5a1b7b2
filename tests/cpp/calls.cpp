// calls MODEL.graft ROUNDS SHAPE...: in each round one call for each shape (as in 4x8), each on the next
// stream of the device, nothing waited for in between. The input of a call is 0.01, 0.02, ... plus the
// round; it is overwritten right behind the call. The program is loaded from bytes that another one was
// loaded from and called before: what that wrote to its buffers is its own. Prints, as JSON, all outputs, what the program notes,
// and how often the host ran the operator `graft_calls::count`, which gives its input.
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <sstream>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>
#include <torchgraft/torchgraft.h>

std::atomic<long> counted{0};

TORCH_LIBRARY(graft_calls, m) {
  m.def("count(Tensor x) -> Tensor", [](const at::Tensor& x) {
    ++counted;
    return x.clone();
  });
}

std::vector<int64_t> shape_of(const std::string& text) {
  std::vector<int64_t> shape;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, 'x');) shape.push_back(std::atoll(word.c_str()));
  return shape;
}

int main(int argc, char** argv) {
  try {
    const auto size = static_cast<int64_t>(std::filesystem::file_size(argv[1]));
    const at::Tensor bytes = at::from_file(argv[1], /*shared=*/false, size, at::kByte);
    const auto other = torchgraft::load(bytes);
    other.forward({at::ones(shape_of(argv[3]), other.device())});
    counted = 0;
    const auto program = torchgraft::load(bytes);
    const int rounds = std::atoi(argv[2]);
    const c10::Device device = program.device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    std::vector<at::Tensor> inputs, outputs;
    for (int round = 0; round < rounds; ++round)
      for (int i = 3; i < argc; ++i) {
        const auto shape = shape_of(argv[i]);
        const auto numbers = at::arange(1, 1 + c10::multiply_integers(shape), at::kFloat);
        inputs.push_back((numbers / 100 + round).reshape(shape).to(device));
      }
    if (device.type() != c10::kCPU) guard.synchronizeDevice(device.index());
    for (const at::Tensor& x : inputs) {
      c10::OptionalStreamGuard on;
      if (device.type() != c10::kCPU) on.reset_stream(guard.getStreamFromGlobalPool(device));
      for (const at::Tensor& made : program.forward({x})) outputs.push_back(made);
      x.fill_(NAN);
    }
    if (device.type() != c10::kCPU) guard.synchronizeDevice(device.index());
    std::cout.precision(9);
    std::cout << "{\"counted\": " << counted << ", \"notes\": [";
    const auto notes = program.notes();
    for (size_t i = 0; i < notes.size(); ++i) std::cout << (i ? ", " : "") << '"' << notes[i] << '"';
    std::cout << "], \"outputs\": [";
    for (size_t i = 0; i < outputs.size(); ++i) {
      const at::Tensor flat = outputs[i].detach().to(at::kCPU, at::kDouble).flatten().contiguous();
      std::cout << (i ? ", " : "") << "[";
      for (int64_t k = 0; k < flat.numel(); ++k)
        std::cout << (k ? ", " : "") << flat.const_data_ptr<double>()[k];
      std::cout << "]";
    }
    std::cout << "]}\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
