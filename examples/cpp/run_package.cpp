// Runs a saved program, with no Python in the process: run_package MODEL.graft SIZE...
// Its input is 0, 1, 2, ... in the given shape, on the device that the program was compiled for.
#include <cstdlib>
#include <iostream>

#include <ATen/ATen.h>
#include <torchgraft/torchgraft.h>

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: run_package MODEL.graft SIZE...\n";
    return 2;
  }
  try {
    const auto program = torchgraft::load(argv[1]);
    std::vector<int64_t> shape;
    for (int i = 2; i < argc; ++i) shape.push_back(std::atoll(argv[i]));
    const auto numbers = at::TensorOptions(at::kFloat).device(program.device());
    const at::Tensor x = at::arange(c10::multiply_integers(shape), numbers).reshape(shape);
    for (const at::Tensor& output : program.forward({x})) std::cout << output << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
