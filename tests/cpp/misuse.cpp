// What a program of somebody who makes mistakes is told: misuse PACKAGE TIED. The program of the
// first takes x; in the second, the state `b` has another name that no state dict knows.
#include <iostream>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include "torch_aie.h"
#include "torchgraft/torchgraft.h"

int main(int, char** argv) {
  nlohmann::json said;
  const auto attempt = [&](const char* what, const auto& act) {
    try {
      act();
      said[what] = nullptr;
    } catch (const torchgraft::Error& error) {
      said[what] = error.what();
    }
  };
  const torchgraft::Program program = torchgraft::load(argv[1]);
  const at::Tensor x = at::ones({3, 8});
  attempt("fits", [&] { program({x}); });
  attempt("unknown name", [&] { program({x}, {{"zz", x}}); });
  attempt("by name", [&] { program({}, {{"x", x}}); });
  attempt("nothing", [&] { program({}); });
  attempt("one more", [&] { program({x, x}); });
  attempt("in a list", [&] { program({c10::List<at::Tensor>({x})}); });
  attempt("number", [&] { program({3}); });
  attempt("float", [&] { program({2.0}); });
  attempt("text", [&] { program({"a"}); });
  attempt("none", [&] { program({c10::IValue()}); });
  attempt("undefined", [&] { program.forward({at::Tensor()}); });
  attempt("undefined weight", [&] {
    torchgraft::Program(program).load_state_dict({{"inner.0.bias", at::Tensor()}});
  });
  attempt("sparse weight", [&] {
    torchgraft::Program(program).load_state_dict(
        {{"inner.0.weight", at::ones({16, 8}).to_sparse()}, {"inner.0.bias", at::ones({16})}});
  });
  attempt("tied", [&] {
    torchgraft::Program tied = torchgraft::load(argv[2]);
    tied.load_state_dict({{"b", at::full({3}, 2.0)}});
    said["tied gives"] = tied.forward({at::ones({3})})[0].sum().item<double>();
  });
  const torchgraft::Program empty;
  attempt("empty", [&] { empty.forward({x}); });
  attempt("empty call", [&] { empty({x}); });
  attempt("empty name", [&] { empty.name(); });
  said["signature"] = program.signature();

  const int64_t n = 5;  // one size is a shape, and a bool is none
  using torch_aie::Input;
  said["shapes"] = {Input({5}).shape, Input({n}).shape, Input({n, 2}).shape, Input({1}, {4}).maxShape};
  said["ranges"] = {Input({5}).IsShapeRange(), Input({1}, {4}).IsShapeRange(), Input(true).IsShapeRange()};
  std::cout << said.dump() << "\n";
}
