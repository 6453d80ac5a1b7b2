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
  at::Layout layout = at::kStrided;
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

// What `InputMismatch` says of an input.
struct Misfit {
  std::string name, declared, got, fix;
  bool is_size = false;  // another size would fit: another gear might
  std::string text() const;
};

struct Signature {
  Signature(const json& data, const Place& place);

  // The leaves of a call; raises `InputMismatch` where it has another structure.
  Values leaves(const c10::IValue& args, const c10::IValue& kwargs) const;
  // Why these tensors do not fit, or nothing.
  std::optional<Misfit> misfit(const std::vector<at::Tensor>& given) const;
  std::string show() const;
  std::string show(const TensorSpec& spec) const;

  std::vector<Spec> specs;
  std::vector<const TensorSpec*> tensors;
  Tree tree, out_tree;
  std::vector<std::string> symbols;
  struct Range {
    int64_t low;
    std::optional<int64_t> high;
    std::string show() const {
      return std::to_string(low) + " to " + (high ? std::to_string(*high) : "any");
    }
  };
  std::vector<Range> ranges;
  std::vector<std::pair<Size, std::string>> guards;

 private:
  Size size(const json& data, int depth = 0);
  std::string show(const Size& size) const;
  std::string sizes(const TensorSpec& spec) const;
};

std::string shown(at::IntArrayRef sizes);  // as Python shows a tuple
size_t leaves_of(const Tree& tree);
bool is_known(const Tree& tree);  // it holds no object of a Python class

c10::IValue unflatten(const Tree& tree, Values& leaves, size_t& next);
bool same(const c10::IValue& one, const c10::IValue& two);

}  // namespace torchgraft
