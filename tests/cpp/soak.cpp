// soak MODEL.graft THREADS CALLS SIZE...: every call of every thread gives the first one's result,
// and memory does not grow. Prints the time of a call, and of the same calls without checks.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torchgraft/torchgraft.h>

long resident() {  // in KiB
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word)
    if (word == "VmRSS:") {
      long value = 0;
      file >> value;
      return value;
    }
  return 0;
}

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int threads = std::atoi(argv[2]), calls = std::atoi(argv[3]);
  std::vector<int64_t> shape;
  for (int i = 4; i < argc; ++i) shape.push_back(std::atoll(argv[i]));
  const auto program = torchgraft::load(argv[1]);
  const at::Tensor x = at::arange(c10::multiply_integers(shape), at::kFloat).reshape(shape) / 10;
  const auto wanted = program.forward({x});
  std::atomic<long> wrong{0};
  const auto work = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const auto made = program.forward({x});
      for (size_t k = 0; k < wanted.size(); ++k)
        if (!at::equal(made[k], wanted[k])) ++wrong;
    }
  };
  const auto all = [&](int count) {
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) running.emplace_back(work, count);
    for (std::thread& one : running) one.join();
  };
  all(calls / 10 + 1);  // allocators and pools have what they want now
  const long before = resident();
  all(calls);
  const long after = resident();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 2000; ++i) program.forward({x});
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  std::cout << "{\"wrong\": " << wrong << ", \"before_kib\": " << before << ", \"after_kib\": " << after
            << ", \"us_per_call\": " << took.count() / 2000 << "}\n";
}
