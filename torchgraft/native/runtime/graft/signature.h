// What a program takes and gives, and whether a call fits it.
#pragma once

#include "graft/plan.h"

namespace torchgraft {

// A size, or a condition, over the symbols of a signature.
struct Size {
  enum Kind { kNumber, kSymbol, kCall } kind = kNumber;
  int64_t number = 0;
  int64_t symbol = -1;
  std::string function;
  std::vector<Size> args;
};

struct TensorSpec {
  std::string name;
  std::vector<Size> shape;
  at::ScalarType dtype;
  c10::Device device = c10::kCPU;
  std::optional<std::vector<int64_t>> stride;  // none: contiguous in `format`
  at::MemoryFormat format;
  bool mutated;
};

struct Spec {
  std::optional<TensorSpec> tensor;
  std::string name;
  Value constant;  // where it is no tensor
};

// The structure of arguments or results.
struct Tree {
  enum Kind { kLeaf, kNone, kTuple, kList, kDict, kOther } kind = kLeaf;
  std::vector<Tree> items;
  std::vector<c10::IValue> keys;
};

struct Signature {
  Signature(const json& data, const Place& place);

  // Why these tensors do not fit (`InputMismatch`'s text), or nothing.
  std::optional<std::string> misfit(const std::vector<at::Tensor>& given) const;
  std::string show() const;

  std::vector<Spec> specs;
  std::vector<const TensorSpec*> tensors;
  Tree tree, out_tree;
  std::vector<std::string> symbols;
  struct Range { int64_t low; std::optional<int64_t> high; };
  std::vector<Range> ranges;
  std::vector<std::pair<Size, std::string>> guards;

 private:
  Size size(const json& data, int depth = 0);
  std::string show(const Size& size, bool named) const;
};

std::string misfit_text(
    const std::string& name, const std::string& declared, const std::string& got,
    const std::string& fix);
size_t leaves_of(const Tree& tree);

}  // namespace torchgraft
