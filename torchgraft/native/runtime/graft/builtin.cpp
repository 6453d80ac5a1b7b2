// Arithmetic of sizes, and parts of sequences.
#include <cmath>

#include "graft/action.h"

namespace torchgraft {
namespace {

struct Builtin : Action {
  Builtin(const Step& step, const Kernel& kernel) : step(step), name(kernel.name) {
    static const std::map<std::string, size_t> known = {
        {"add", 2}, {"sub", 2}, {"mul", 2}, {"floordiv", 2}, {"truediv", 2}, {"mod", 2}, {"neg", 1},
        {"pow", 2}, {"lt", 2}, {"le", 2}, {"gt", 2}, {"ge", 2}, {"eq", 2}, {"ne", 2}, {"and_", 2},
        {"or_", 2}, {"getitem", 2}, {"abs", 1}, {"pos", 1}, {"ceil", 1}, {"floor", 1}, {"trunc", 1},
        {"sym_max", 2}, {"sym_min", 2}, {"sym_not", 1}, {"sym_float", 1}, {"sym_int", 1},
        {"sym_ite", 3}, {"round", 1}};
    const auto found = known.find(name);
    if (found == known.end()) bad("not something to call: " + quote(name));
    if (step.args.size() != found->second || !step.kwargs.empty())
      bad(name + " takes " + std::to_string(found->second) + " arguments");
  }

  void run(Frame& frame) const override {
    Values a;
    for (const Value& arg : step.args) a.push_back(frame.fill(arg));
    store(frame, step, result(a));
  }

  static double number(const c10::IValue& value) {
    if (value.isInt()) return static_cast<double>(value.toInt());
    if (value.isBool()) return value.toBool();
    if (!value.isDouble()) throw Error("arithmetic of sizes with " + value.tagKind());
    return value.toDouble();
  }

  c10::IValue result(const Values& a) const {
    if (name == "getitem") {
      const int64_t at = a[1].isInt() ? a[1].toInt() : -1;
      const Values parts = parts_of(a[0]).value_or(Values());
      if (at < 0 || static_cast<size_t>(at) >= parts.size()) throw Error("getitem: there is no such part");
      return parts[at];
    }
    if (name == "sym_ite") return number(a[0]) != 0 ? a[1] : a[2];
    if (name == "sym_not") return number(a[0]) == 0;
    const double x = number(a[0]), y = a.size() > 1 ? number(a[1]) : 0;
    if (name == "lt") return x < y;
    if (name == "le") return x <= y;
    if (name == "gt") return x > y;
    if (name == "ge") return x >= y;
    if (name == "eq") return x == y;
    if (name == "ne") return x != y;
    if (name == "sym_float") return x;
    if (name == "ceil" || name == "floor" || name == "trunc" || name == "sym_int" || name == "round") {
      if (!a[0].isDouble()) return static_cast<int64_t>(x);
      if (name == "ceil") return static_cast<int64_t>(std::ceil(x));
      if (name == "floor") return static_cast<int64_t>(std::floor(x));
      if (name == "round") return static_cast<int64_t>(std::nearbyint(x));
      return static_cast<int64_t>(std::trunc(x));
    }
    if ((name == "floordiv" || name == "truediv" || name == "mod") && y == 0)
      throw Error("a size is divided by 0");
    if (name == "truediv") return x / y;
    const bool whole = !a[0].isDouble() && (a.size() < 2 || !a[1].isDouble());
    if (!whole) {
      if (name == "add") return x + y;
      if (name == "sub") return x - y;
      if (name == "mul") return x * y;
      if (name == "floordiv") return std::floor(x / y);
      if (name == "mod") return x - std::floor(x / y) * y;
      if (name == "pow") return std::pow(x, y);
      if (name == "neg") return -x;
      if (name == "abs") return std::abs(x);
      if (name == "pos") return x;
      return name == "sym_max" ? std::max(x, y) : std::min(x, y);
    }
    const int64_t i = a[0].isBool() ? a[0].toBool() : a[0].toInt();
    const int64_t j = a.size() < 2 ? 0 : a[1].isBool() ? a[1].toBool() : a[1].toInt();
    int64_t made = 0;
    bool over = false;
    if (name == "add") over = __builtin_add_overflow(i, j, &made);
    else if (name == "sub") over = __builtin_sub_overflow(i, j, &made);
    else if (name == "mul") over = __builtin_mul_overflow(i, j, &made);
    else if (name == "neg") over = __builtin_sub_overflow(int64_t{0}, i, &made);
    else if (name == "abs") over = i == INT64_MIN || (made = std::abs(i), false);
    else if (name == "pos") made = i;
    else if (name == "sym_max") made = std::max(i, j);
    else if (name == "sym_min") made = std::min(i, j);
    else if (name == "and_") made = i & j;
    else if (name == "or_") made = i | j;
    else if (name == "pow") {
      const double power = std::pow(x, y);
      over = !(std::abs(power) < 9e18);
      if (!over) made = static_cast<int64_t>(power);
    } else {  // floordiv, mod: Python's, which round down
      over = i == INT64_MIN && j == -1;
      if (!over) {
        const int64_t down = i / j - (i % j != 0 && (i % j < 0) != (j < 0));
        made = name == "floordiv" ? down : i - down * j;
      }
    }
    if (over) throw Error("a size has more than 64 bits");
    if (a[0].isBool() && (name == "and_" || name == "or_")) return made != 0;
    return made;
  }

  const Step& step;
  std::string name;
};

}  // namespace

std::unique_ptr<Action> call_builtin(const Step& step, const Kernel& kernel) {
  return std::make_unique<Builtin>(step, kernel);
}

}  // namespace torchgraft
