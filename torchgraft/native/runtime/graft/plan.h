// Plans: what runs. Parsed from JSON, checked and proved before the first call.
#pragma once

#include <string>
#include <vector>

#include "graft/archive.h"

namespace torchgraft {

// A device of the package as the one here that stands for it.
struct Place {
  c10::Device device = c10::kCPU;
  c10::Device operator()(const std::string& name) const;
};

using Values = std::vector<c10::IValue>;

inline constexpr const char* kMain = "main";  // the caller's stream
inline constexpr int kDeepest = 64;  // nesting of a value in a package
// The parts of a tuple or a list.
std::optional<Values> parts_of(const c10::IValue& value);

// A number, text or None, and its type, as Python says them.
std::string show(const c10::IValue& value);
std::string kind_of(const c10::IValue& value);

at::ScalarType dtype_named(const std::string& name);
const char* dtype_name(at::ScalarType type);
at::MemoryFormat format_named(const std::string& name);
at::Layout layout_named(const std::string& name);
std::string layout_name(at::Layout layout);

// An argument: a literal, a buffer, or a sequence of such.
struct Value {
  enum Kind { kLiteral, kBuffer, kList, kTuple } kind = kLiteral;
  c10::IValue literal;
  int64_t buffer = -1;
  std::vector<Value> items;
  std::string shown;  // of a literal that is no plain IValue, such as a dtype

  template <typename F>
  void each_buffer(F&& visit) const {
    if (kind == kBuffer) visit(buffer);
    for (const Value& item : items) item.each_buffer(visit);
  }
};

struct Step {
  enum Kind { kLaunch, kRecord, kWait, kFree } kind;
  std::string stream, name;  // of the kernel, or of the event
  std::vector<Value> args;
  std::vector<std::pair<std::string, Value>> kwargs;
  std::vector<int64_t> outputs;  // -1: not used
  bool unpack = false;
  bool collective = false;  // other ranks take part in it
  std::vector<int64_t> writes;
  int64_t buffer = -1;  // to free
};

// Buffers are numbered without gaps; `names` has the numbers of the file.
struct Plan {
  std::vector<int64_t> inputs;
  std::vector<std::pair<int64_t, std::string>> constants;
  std::vector<Step> steps;
  std::vector<Value> outputs;
  std::vector<std::pair<int64_t, int64_t>> shared;
  std::vector<int64_t> names;

  std::string show(int64_t buffer) const { return "b" + std::to_string(names.at(buffer)); }
  std::string show(const Value& value) const;
  std::string show(const Step& step) const;
};

Value parse_value(const json& data, const Place& place);
Plan parse_plan(const json& data, const Place& place);  // raises `BadPlan` where it cannot run
void prove(const Plan& plan);                           // raises `UnorderedUse` where it could race

}  // namespace torchgraft
