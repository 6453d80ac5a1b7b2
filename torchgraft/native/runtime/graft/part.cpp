// Entries of `programs`, from JSON.
#include "graft/link.h"

namespace torchgraft {
namespace {

std::vector<bool> flags(const json& data, const char* name) {
  std::vector<bool> made;
  for (const json& one : list(data, name)) {
    if (!one.is_boolean()) bad(quote(name) + " must be a list of truth values: " + brief(one));
    made.push_back(one.get<bool>());
  }
  return made;
}

size_t number_in(const json& data, const char* name, size_t end) {
  return index(field(data, name, json::value_t::number_integer), static_cast<int64_t>(end));
}

Kernel kernel_of(
    const json& data, size_t values, const Place& place,
    const std::map<std::string, std::string>& libraries) {
  Kernel kernel;
  const std::string& kind = text(data, "kind");
  if (kind == "library") {
    kernel.kind = Kernel::kLibrary;
    const auto found = libraries.find(text(data, "member"));
    if (found == libraries.end()) bad("there is no library " + quote(text(data, "member")));
    kernel.path = found->second;
    kernel.device = place(text(data, "device"));
    for (const auto& [constant, at] : object(data, "constants").items())
      kernel.constants.emplace_back(constant, index(at, static_cast<int64_t>(values)));
    kernel.ints = flags(data, "ints");
    kernel.int_outputs = flags(data, "int_outputs");
    return kernel;
  }
  kernel.name = text(data, "name");
  if (kind == "op") {
    kernel.kind = Kernel::kOp;
    kernel.overload = text(data, "overload");
  } else if (kind == "builtin" || kind == "higher") {
    kernel.kind = kind == "builtin" ? Kernel::kBuiltin : Kernel::kHigher;
  } else {
    bad("not something to call: " + brief(data));
  }
  return kernel;
}

Constant constant_of(
    const json& data, size_t number, size_t values, const Place& place,
    const std::map<std::string, std::string>& libraries) {
  Constant constant;
  const std::string& kind = text(data, "kind");
  if (kind == "value") {
    constant.kind = Constant::kValue;
    constant.index = number_in(data, "value", values);
  } else if (kind == "program") {
    constant.kind = Constant::kProgram;
    constant.index = number_in(data, "program", number);  // branches come before what calls them
    constant.single = flag(data, "single");
    constant.dense = flags(data, "dense");
  } else {
    constant.kind = Constant::kOp;
    constant.callee = kernel_of(data, values, place, libraries);
    if (constant.callee.kind == Kernel::kLibrary) bad("a constant is generated code");
  }
  return constant;
}

}  // namespace

Part parse_part(
    const json& data, size_t number, size_t values, const Place& place,
    const std::map<std::string, std::string>& libraries) {
  Part made;
  made.plan = parse_plan(object(data, "plan"), place);
  for (const auto& [name, entry] : object(data, "kernels").items())
    made.kernels[name] = kernel_of(entry, values, place, libraries);
  for (const auto& [name, entry] : object(data, "constants").items())
    made.constants[name] = constant_of(entry, number, values, place, libraries);
  return made;
}

}  // namespace torchgraft
