// forward PACKAGE LIBRARY|operators N: what a call costs in C++, and what its kernels cost alone.
//
// The kernels are the package's one region, called as AOTInductor's runner, or the operators of
// `bench.native.operators`, called one after the other. They take turns; the best round counts.
#include <chrono>
#include <iostream>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torchgraft/torchgraft.h>

template <typename F>
double microseconds(F&& call) {
  constexpr int kCalls = 100;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return took.count() / kCalls;
}

int main(int argc, char** argv) {
  at::set_num_threads(1);
  at::NoGradGuard none;
  const auto program = torchgraft::load(argv[1]);
  const std::string library = argv[2];
  const int64_t size = std::atoll(argv[3]);
  const at::Tensor x = at::rand({size, size});
  std::unique_ptr<torch::inductor::AOTIModelContainerRunnerCpu> runner;
  if (library != "operators")
    runner = std::make_unique<torch::inductor::AOTIModelContainerRunnerCpu>(library, 1);
  const auto kernels = [&] {
    if (runner) {
      std::vector<at::Tensor> inputs{x};
      return runner->run(inputs);
    }
    const at::Tensor sorted = std::get<0>(at::sort(at::cumsum(at::mm(x, x), 0)));
    return std::vector<at::Tensor>{at::softmax(sorted, 1)};
  };
  if (!at::allclose(program.forward({x})[0], kernels()[0])) return 1;
  double forward = 1e9, alone = 1e9;
  for (int round = 0; round < 1000; ++round) {
    forward = std::min(forward, microseconds([&] { program.forward({x}); }));
    alone = std::min(alone, microseconds(kernels));
  }
  std::cout << "{\"forward_us\": " << forward << ", \"kernels_us\": " << alone << "}\n";
}
