#include "graft/plan.h"

#include <cmath>
#include <map>
#include <set>
#include <sstream>

namespace torchgraft {
namespace {

const std::vector<std::pair<const char*, at::ScalarType>>& dtypes() {
  static const std::vector<std::pair<const char*, at::ScalarType>> table = {
      {"float32", at::kFloat},       {"float64", at::kDouble},
      {"float16", at::kHalf},        {"bfloat16", at::kBFloat16},
      {"int64", at::kLong},          {"int32", at::kInt},
      {"int16", at::kShort},         {"int8", at::kChar},
      {"uint8", at::kByte},          {"uint16", at::kUInt16},
      {"uint32", at::kUInt32},       {"uint64", at::kUInt64},
      {"bool", at::kBool},           {"complex32", at::kComplexHalf},
      {"complex64", at::kComplexFloat}, {"complex128", at::kComplexDouble},
      {"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2},
      {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz}, {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz}};
  return table;
}

const std::vector<std::pair<const char*, at::Layout>>& layouts() {
  static const std::vector<std::pair<const char*, at::Layout>> table = {
      {"strided", at::kStrided},      {"sparse_coo", at::kSparse},
      {"sparse_csr", at::kSparseCsr}, {"sparse_csc", at::kSparseCsc},
      {"sparse_bsr", at::kSparseBsr}, {"sparse_bsc", at::kSparseBsc},
      {"_mkldnn", at::kMkldnn},       {"jagged", at::kJagged}};
  return table;
}

// Gives buffers numbers without gaps, so that a large number in a file costs nothing.
struct Numbers {
  std::map<int64_t, int64_t> of;
  std::vector<int64_t> names;
  int64_t operator()(const json& data) {
    const int64_t name = index(data);
    const auto [found, fresh] = of.emplace(name, static_cast<int64_t>(names.size()));
    if (fresh) names.push_back(name);
    return found->second;
  }
};

Value value(const json& data, const Place& place, Numbers* numbers, int depth) {
  if (depth > kDeepest) bad("a value is nested more than " + std::to_string(kDeepest) + " deep");
  Value made;
  const auto items = [&](const json& list, Value::Kind kind) {
    made.kind = kind;
    for (const json& part : list) made.items.push_back(value(part, place, numbers, depth + 1));
  };
  if (data.is_null()) return made;
  if (data.is_boolean()) return made.literal = data.get<bool>(), made;
  if (data.is_number_integer()) return made.literal = integer(data), made;
  if (data.is_number_float()) return made.literal = data.get<double>(), made;
  if (data.is_string()) return made.literal = data.get<std::string>(), made;
  if (data.is_array()) return items(data, Value::kList), made;
  if (!data.is_object() || data.size() != 1) bad("not a value: " + brief(data));
  const auto& kind = data.begin().key();
  const json& inner = data.begin().value();
  if (kind == "b" && numbers) {
    made.kind = Value::kBuffer;
    made.buffer = (*numbers)(inner);
  } else if (kind == "t" && inner.is_array()) {
    items(inner, Value::kTuple);
  } else if (kind == "f" && (inner == "inf" || inner == "-inf" || inner == "nan")) {
    made.literal = inner == "nan" ? NAN : inner == "inf" ? INFINITY : -INFINITY;
    made.shown = "float('" + text(inner) + "')";
  } else if (kind == "c" && inner.is_array() && inner.size() == 2) {
    const Value real = value(inner[0], place, nullptr, depth + 1);
    const Value imaginary = value(inner[1], place, nullptr, depth + 1);
    if (!real.literal.isDouble() || !imaginary.literal.isDouble()) bad("not a value: " + brief(data));
    made.literal = c10::complex<double>(real.literal.toDouble(), imaginary.literal.toDouble());
  } else if (kind == "device") {
    made.literal = place(text(inner));
    made.shown = "device('" + text(inner) + "')";
  } else if (kind == "dtype") {
    made.literal = static_cast<int64_t>(dtype_named(text(inner)));
    made.shown = "torch." + text(inner);
  } else if (kind == "layout") {
    made.literal = static_cast<int64_t>(layout_named(text(inner)));
    made.shown = "torch." + text(inner);
  } else if (kind == "memory_format") {
    made.literal = static_cast<int64_t>(format_named(text(inner)));
    made.shown = "torch." + text(inner);
  } else {
    bad("not a value: " + brief(data));
  }
  return made;
}

Step step(const json& data, const Place& place, Numbers& numbers) {
  Step made;
  made.stream = text(data, "stream");
  if (data.contains("launch")) {
    made.kind = Step::kLaunch;
    made.name = text(data, "launch");
    made.collective = data.contains("collective");
    for (const json& arg : list(data, "args")) made.args.push_back(value(arg, place, &numbers, 0));
    for (const json& named : list(data, "kwargs")) {
      const auto [name, arg] = pair(named, "kwargs");
      made.kwargs.emplace_back(text(*name), value(*arg, place, &numbers, 0));
    }
    for (const json& out : list(data, "outputs"))
      made.outputs.push_back(out.is_null() ? -1 : numbers(out));
    made.unpack = flag(data, "unpack");
    if (!made.unpack && made.outputs.size() > 1) bad("a launch that gives one value has several outputs");
    for (const json& out : list(data, "writes")) made.writes.push_back(numbers(out));
  } else if (data.contains("free")) {
    made.kind = Step::kFree;
    made.buffer = numbers(data.at("free"));
  } else if (data.contains("record")) {
    made.kind = Step::kRecord;
    made.name = text(data, "record");
  } else {
    made.kind = Step::kWait;
    made.name = text(data, "wait");
  }
  return made;
}

void verify(const Plan& plan) {
  enum { kNever, kLive, kFreed };
  std::vector<int> state(plan.names.size(), kNever);
  std::set<std::string> events;
  for (int64_t buffer : plan.inputs) state[buffer] = kLive;
  for (const auto& [buffer, name] : plan.constants) state[buffer] = kLive;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    const auto wrong = [&](const std::string& why) {
      throw BadPlan("plan, step " + std::to_string(i) + " (" + plan.show(step) + "): " + why);
    };
    const auto used = [&](int64_t buffer) {
      if (state[buffer] != kLive)
        wrong(plan.show(buffer) + " is used but was " +
              (state[buffer] == kFreed ? "freed before" : "never written"));
    };
    switch (step.kind) {
      case Step::kLaunch:
        for (const Value& arg : step.args) arg.each_buffer(used);
        for (const auto& [name, arg] : step.kwargs) arg.each_buffer(used);
        for (int64_t out : step.outputs) {
          if (out >= 0 && state[out] != kNever) wrong(plan.show(out) + " is written twice");
          if (out >= 0) state[out] = kLive;
        }
        break;
      case Step::kFree:
        if (state[step.buffer] != kLive) wrong(plan.show(step.buffer) + " is freed but is not alive");
        state[step.buffer] = kFreed;
        break;
      case Step::kRecord:
        events.insert(step.name);
        break;
      case Step::kWait:
        if (!events.count(step.name))
          wrong("event '" + step.name + "' is waited for before it is recorded");
    }
  }
  for (const Value& out : plan.outputs)
    out.each_buffer([&](int64_t buffer) {
      if (state[buffer] != kLive)
        throw BadPlan("plan, return: " + plan.show(buffer) + " is returned but is not alive");
    });
}

}  // namespace

c10::Device Place::operator()(const std::string& name) const {
  try {
    const c10::Device named(name);
    return named.type() == device.type() && device.type() != c10::kCPU ? device : named;
  } catch (const c10::Error&) {
    bad("there is no device " + quote(name));
  }
}

std::optional<Values> parts_of(const c10::IValue& value) {
  if (value.isList()) return value.toListRef().vec();
  if (!value.isTuple()) return std::nullopt;
  const auto& items = value.toTupleRef().elements();
  return Values(items.begin(), items.end());
}

std::string show(const c10::IValue& value) {
  if (value.isNone()) return "None";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isString()) return quote(value.toStringRef());
  if (value.isDouble() && std::isfinite(value.toDouble())) return json(value.toDouble()).dump();
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string kind_of(const c10::IValue& value) {
  if (value.isNone()) return "NoneType";
  if (value.isBool()) return "bool";
  if (value.isInt()) return "int";
  if (value.isDouble()) return "float";
  return value.isString() ? "str" : value.tagKind();
}

at::ScalarType dtype_named(const std::string& name) {
  for (const auto& [known, type] : dtypes())
    if (name == known) return type;
  bad("there is no dtype " + quote(name) + " in torch");
}

const char* dtype_name(at::ScalarType type) {
  for (const auto& [known, one] : dtypes())
    if (one == type) return known;
  return at::toString(type);
}

at::MemoryFormat format_named(const std::string& name) {
  if (name == "contiguous_format") return at::MemoryFormat::Contiguous;
  if (name == "preserve_format") return at::MemoryFormat::Preserve;
  if (name == "channels_last") return at::MemoryFormat::ChannelsLast;
  if (name == "channels_last_3d") return at::MemoryFormat::ChannelsLast3d;
  bad("there is no memory_format " + quote(name) + " in torch");
}

at::Layout layout_named(const std::string& name) {
  for (const auto& [known, layout] : layouts())
    if (name == known) return layout;
  bad("there is no layout " + quote(name) + " in torch");
}

std::string layout_name(at::Layout layout) {
  for (const auto& [known, one] : layouts())
    if (one == layout) return known;
  return "unknown";
}

std::string Plan::show(const Value& value) const {
  if (value.kind == Value::kBuffer) return show(value.buffer);
  if (value.kind == Value::kLiteral)
    return value.shown.empty() ? torchgraft::show(value.literal) : value.shown;
  std::string inner;
  for (const Value& item : value.items) inner += (inner.empty() ? "" : ", ") + show(item);
  if (value.kind == Value::kList) return "[" + inner + "]";
  return "(" + inner + (value.items.size() == 1 ? ",)" : ")");
}

std::string Plan::show(const Step& step) const {
  const std::string stream = "'" + step.stream + "'";
  if (step.kind == Step::kRecord) return "record(" + stream + ", '" + step.name + "')";
  if (step.kind == Step::kWait) return "wait(" + stream + ", '" + step.name + "')";
  if (step.kind == Step::kFree) return "free(" + stream + ", " + show(step.buffer) + ")";
  std::string left;
  for (int64_t out : step.outputs) left += (left.empty() ? "" : ", ") + (out < 0 ? "_" : show(out));
  if (!left.empty()) left += step.unpack && step.outputs.size() == 1 ? ", = " : " = ";
  std::string text = left + "launch(" + stream + ", '" + step.name + "'";
  for (const Value& arg : step.args) text += ", " + show(arg);
  for (const auto& [name, arg] : step.kwargs) text += ", " + name + "=" + show(arg);
  return text + ")";
}

Value parse_value(const json& data, const Place& place) { return value(data, place, nullptr, 0); }

Plan parse_plan(const json& data, const Place& place) {
  Plan plan;
  Numbers numbers;
  for (const json& one : list(data, "inputs")) plan.inputs.push_back(numbers(one));
  for (const json& one : list(data, "constants")) {
    const auto [buffer, name] = pair(one, "constants");
    plan.constants.emplace_back(numbers(*buffer), text(*name));
  }
  for (const json& one : list(data, "steps")) plan.steps.push_back(step(one, place, numbers));
  for (const json& one : list(data, "outputs")) plan.outputs.push_back(value(one, place, &numbers, 0));
  for (const json& one : list(data, "shared")) {
    const auto [view, base] = pair(one, "shared");
    const int64_t first = numbers(*view);
    plan.shared.emplace_back(first, numbers(*base));
  }
  plan.names = std::move(numbers.names);
  verify(plan);
  return plan;
}

// --- The proof: the plan is replayed with one vector clock per stream ---

void prove(const Plan& plan) {
  using Clock = std::map<std::string, int64_t>;
  struct Touch { std::string stream; int64_t tick; int64_t step; };
  struct Memory {
    std::optional<Touch> write;
    std::map<std::string, Touch> reads;
  };
  std::map<int64_t, int64_t> roots;
  for (const auto& [view, base] : plan.shared)
    roots[view] = roots.count(base) ? roots[base] : base;
  const auto root = [&](int64_t buffer) {
    const auto found = roots.find(buffer);
    return found == roots.end() ? buffer : found->second;
  };
  std::map<std::string, Clock> clocks{{kMain, {{kMain, 1}}}}, events;
  std::map<int64_t, Memory> memory;
  for (int64_t buffer : plan.inputs) memory[root(buffer)].write = Touch{kMain, 1, -1};
  const int64_t count = static_cast<int64_t>(plan.steps.size());
  const auto check = [&](int64_t buffer, const Touch& before, Clock& clock, int64_t at, const char* kind) {
    if (clock[before.stream] >= before.tick) return;
    const std::string first = before.step < 0 ? "the caller" : plan.show(plan.steps[before.step]);
    const std::string second = at >= count ? "the return to the caller" : plan.show(plan.steps[at]);
    throw UnorderedUse(
        std::string(kind) + " of " + plan.show(buffer) + ": nothing orders\n  " + second +
        "\nafter\n  " + first +
        "\nRecord an event after the first and wait for it before the second, or let torchgraft "
        "place the waits (graph.order states what data order does not).");
  };
  const auto before_write = [&](int64_t buffer, Clock& clock, int64_t at, const char* kind) {
    const Memory& held = memory[root(buffer)];
    if (held.write) check(buffer, *held.write, clock, at, kind ? kind : "write after write");
    for (const auto& [stream, touch] : held.reads)
      check(buffer, touch, clock, at, kind ? kind : "write after read");
  };
  for (int64_t at = 0; at < count; ++at) {
    const Step& step = plan.steps[at];
    Clock& clock = clocks[step.stream];
    switch (step.kind) {
      case Step::kLaunch: {
        std::map<int64_t, bool> touched;  // memory, and whether it is written
        const auto reads = [&](int64_t buffer) { touched.emplace(root(buffer), false); };
        for (const Value& arg : step.args) arg.each_buffer(reads);
        for (const auto& [name, arg] : step.kwargs) arg.each_buffer(reads);
        for (int64_t out : step.outputs)
          if (out >= 0) touched.emplace(root(out), !roots.count(out));
        for (int64_t buffer : step.writes) touched[root(buffer)] = true;
        const int64_t tick = clock[step.stream] + 1;
        for (const auto& [buffer, writes] : touched) {
          Memory& held = memory[buffer];
          if (writes) {
            before_write(buffer, clock, at, nullptr);
            held = {Touch{step.stream, tick, at}, {}};
          } else {
            if (held.write) check(buffer, *held.write, clock, at, "read after write");
            held.reads[step.stream] = {step.stream, tick, at};
          }
        }
        clock[step.stream] = tick;
        break;
      }
      case Step::kRecord:
        events[step.name] = clock;
        break;
      case Step::kWait:
        for (const auto& [stream, tick] : events[step.name])
          clock[stream] = std::max(clock[stream], tick);
        break;
      case Step::kFree:
        before_write(step.buffer, clock, at, "free");
    }
  }
  Clock& last = clocks[kMain];
  for (const Value& out : plan.outputs)
    out.each_buffer([&](int64_t buffer) { before_write(buffer, last, count, "return"); });
  for (int64_t buffer : plan.inputs) before_write(buffer, last, count, "return");
}

}  // namespace torchgraft
