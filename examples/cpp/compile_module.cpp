// Compiles a TorchScript module inside a C++ program: compile_module MODEL.pt [LIBRARY.so] SIZE...
// A library of converters is loaded first. Prints the largest difference from the module itself.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <iostream>

#include <torch/script.h>

#include "torch_aie.h"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: compile_module MODEL.pt [LIBRARY.so] SIZE...\n";
    return 2;
  }
  int next = 2;
  if (std::strstr(argv[next], ".so") && !dlopen(argv[next++], RTLD_NOW)) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  try {
    torch_aie::set_device(0);
    torch::jit::Module module = torch::jit::load(argv[1]);
    module.eval();
    std::vector<int64_t> shape;
    for (; next < argc; ++next) shape.push_back(std::atoll(argv[next]));

    torch_aie::torchscript::CompileSpec spec({torch_aie::Input(
        shape, torch_aie::DataType::FLOAT, torch_aie::TensorFormat::ND)});
    spec.soc_version = "Ascend310P3";
    spec.precision_policy = torch_aie::PrecisionPolicy::FP32;  // FP16 where nothing is said
    torch::jit::Module compiled = torch_aie::torchscript::compile(module, spec);

    const at::Tensor x = at::randn(shape);
    const at::Tensor made = compiled.forward({x}).toTensor();
    const at::Tensor wanted = module.forward({x}).toTensor();
    std::cout << "largest difference: "
              << (made.to(at::kDouble) - wanted.to(at::kDouble)).abs().max().item<double>() << "\n";
    torch_aie::finalize();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
