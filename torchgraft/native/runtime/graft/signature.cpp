#include "graft/signature.h"

#include <cmath>
#include <set>

namespace torchgraft {
namespace {

// Exact for the integers of 64 bits, with fractions on the way.
long double evaluate(const Size& size, const std::vector<int64_t>& symbols) {
  if (size.kind == Size::kNumber) return size.number;
  if (size.kind == Size::kSymbol) return symbols[size.symbol];
  std::vector<long double> a;
  for (const Size& arg : size.args) a.push_back(evaluate(arg, symbols));
  const std::string& f = size.function;
  const auto fold = [&](auto&& join) {
    long double made = a.at(0);
    for (size_t i = 1; i < a.size(); ++i) made = join(made, a[i]);
    return made;
  };
  const auto divided = [&] {
    if (a.at(1) == 0) throw InputMismatch("a size is divided by 0");
    return a[0] / a[1];
  };
  if (f == "Add") return fold([](auto x, auto y) { return x + y; });
  if (f == "Mul") return fold([](auto x, auto y) { return x * y; });
  if (f == "Max") return fold([](auto x, auto y) { return std::max(x, y); });
  if (f == "Min") return fold([](auto x, auto y) { return std::min(x, y); });
  if (f == "And") return fold([](auto x, auto y) { return (long double)(x != 0 && y != 0); });
  if (f == "Or") return fold([](auto x, auto y) { return (long double)(x != 0 || y != 0); });
  if (f == "Not") return a.at(0) == 0;
  if (f == "Pow" || f == "PowByNatural") return std::pow(a.at(0), a.at(1));
  if (f == "FloorDiv" || f == "CleanDiv") return std::floor(divided());
  if (f == "CeilDiv") return std::ceil(divided());
  if (f == "IntTrueDiv" || f == "Rational") return divided();
  if (f == "Mod" || f == "PythonMod") return a[0] - std::floor(divided()) * a[1];
  if (f == "Eq") return a.at(0) == a.at(1);
  if (f == "Ne") return a.at(0) != a.at(1);
  if (f == "Lt") return a.at(0) < a.at(1);
  if (f == "Le") return a.at(0) <= a.at(1);
  if (f == "Gt") return a.at(0) > a.at(1);
  return a.at(0) >= a.at(1);  // Ge, the last that `arity` knows
}

// How many arguments a function takes: at least and at most; nothing where there is no such one.
std::optional<std::pair<size_t, size_t>> arity(const std::string& name) {
  static const std::set<std::string> many = {"Add", "Mul", "Max", "Min", "And", "Or"};
  static const std::set<std::string> two = {
      "Pow", "PowByNatural", "FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "Rational", "Mod",
      "PythonMod", "Eq", "Ne", "Lt", "Le", "Gt", "Ge"};
  if (many.count(name)) return {{1, 1000}};
  if (two.count(name)) return {{2, 2}};
  if (name == "Not") return {{1, 1}};
  return std::nullopt;
}

Tree parse_tree(const json& data, int depth = 0) {
  Tree tree;
  if (data.is_string() && data == "*") return tree;
  if (data.is_null()) {
    tree.kind = Tree::kNone;
    return tree;
  }
  if (data.is_object() && data.size() == 1 && depth <= kDeepest) {
    const auto& kind = data.begin().key();
    const json& inner = data.begin().value();
    if ((kind == "tuple" || kind == "list") && inner.is_array()) {
      tree.kind = kind == "tuple" ? Tree::kTuple : Tree::kList;
      for (const json& part : inner) tree.items.push_back(parse_tree(part, depth + 1));
      return tree;
    }
    if (kind == "dict" && inner.is_array()) {
      tree.kind = Tree::kDict;
      for (const json& entry : inner) {
        const auto [key, part] = pair(entry, "dict");
        const Value name = parse_value(*key, Place());
        if (name.kind != Value::kLiteral || !(name.literal.isString() || name.literal.isInt()))
          bad("a dict has a key that C++ has no type for: " + brief(*key));
        tree.keys.push_back(name.literal);
        tree.items.push_back(parse_tree(*part, depth + 1));
      }
      return tree;
    }
    if (kind == "returns" && inner.is_array() && inner.size() == 2 && inner[1].is_array()) {
      tree.kind = Tree::kTuple;  // a class of torch.return_types is a tuple with names
      for (const json& part : inner[1]) tree.items.push_back(parse_tree(part, depth + 1));
      return tree;
    }
    if (kind == "pytree" && inner.is_string()) {
      tree.kind = Tree::kOther;
      return tree;
    }
  }
  bad("not a structure of arguments: " + brief(data));
}

bool uses(const Size& size, int64_t symbol) {
  if (size.kind == Size::kSymbol) return size.symbol == symbol;
  for (const Size& arg : size.args)
    if (uses(arg, symbol)) return true;
  return false;
}

bool overlap(const at::Tensor& one, const at::Tensor& two) {
  if (one.numel() == 0 || two.numel() == 0) return false;
  if (one.is_same(two) || one.dtype() != two.dtype()) return true;
  const auto ends = [](const at::Tensor& t) {
    int64_t high = t.storage_offset() + 1;
    for (int64_t dim = 0; dim < t.dim(); ++dim) high += (t.size(dim) - 1) * t.stride(dim);
    return std::make_pair(t.storage_offset(), high);
  };
  const auto [low, high] = ends(one);
  const auto [low2, high2] = ends(two);
  if (high <= low2 || high2 <= low) return false;
  const int64_t first = std::min(low, low2);
  at::Tensor marks = at::zeros({std::max(high, high2) - first}, at::kBool);
  marks.as_strided(one.sizes(), one.strides(), low - first).fill_(true);
  return marks.as_strided(two.sizes(), two.strides(), low2 - first).any().item<bool>();
}

}  // namespace

std::string shown(at::IntArrayRef sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + (sizes.size() == 1 ? ",)" : ")");
}

std::string Misfit::text() const {
  return "input '" + name + "': declared " + declared + ", got " + got + ".\n" + fix;
}

bool is_known(const Tree& tree) {
  return tree.kind != Tree::kOther && std::all_of(tree.items.begin(), tree.items.end(), is_known);
}

size_t leaves_of(const Tree& tree) {
  if (tree.kind == Tree::kLeaf) return 1;
  size_t count = 0;
  for (const Tree& item : tree.items) count += leaves_of(item);
  return count;
}

Size Signature::size(const json& data, int depth) {
  Size made;
  if (data.is_boolean()) return made.number = data.get<bool>(), made;
  if (data.is_number_integer()) return made.number = integer(data), made;
  if (depth > kDeepest || !data.is_object()) bad("not a size: " + brief(data));
  if (data.size() == 1 && data.contains("s")) {
    made.kind = Size::kSymbol;
    const auto found = std::find(symbols.begin(), symbols.end(), text(data, "s"));
    if (found == symbols.end()) bad("a size has a symbol without a range: " + brief(data));
    made.symbol = found - symbols.begin();
    return made;
  }
  made.kind = Size::kCall;
  made.function = text(data, "e");
  for (const json& arg : list(data, "a")) made.args.push_back(size(arg, depth + 1));
  const auto wanted = arity(made.function);
  if (!wanted || made.args.size() < wanted->first || made.args.size() > wanted->second)
    bad("not a size: " + brief(data));
  return made;
}

Signature::Signature(const json& data, const Place& place)
    : tree(parse_tree(data.contains("tree") ? data.at("tree") : json())),
      out_tree(parse_tree(data.contains("out_tree") ? data.at("out_tree") : json())) {
  for (const auto& [name, bounds] : object(data, "ranges").items()) {
    const auto [low, high] = pair(bounds, "ranges");
    symbols.push_back(name);
    ranges.push_back({index(*low, INT64_MAX),
                      high->is_null() ? std::nullopt : std::optional<int64_t>(integer(*high))});
  }
  for (const json& guard : list(data, "guards")) {
    const auto [condition, line] = pair(guard, "guards");
    guards.emplace_back(size(*condition), text(*line));
  }
  const json& inputs = list(data, "inputs");
  for (const json& one : inputs) {
    Spec spec;
    spec.name = text(one, "name");
    if (text(one, "kind") == "const") {
      spec.constant = parse_value(one.contains("value") ? one.at("value") : json(), place);
    } else {
      TensorSpec made;
      made.name = spec.name;
      for (const json& part : list(one, "shape")) made.shape.push_back(size(part));
      made.dtype = dtype_named(text(one, "dtype"));
      made.device = place(text(one, "device"));
      made.format = format_named(text(one, "format"));
      made.mutated = flag(one, "mutated");
      made.layout = layout_named(text(one, "layout"));
      if (one.contains("stride") && !one.at("stride").is_null()) {
        made.stride.emplace();
        for (const json& part : list(one, "stride")) made.stride->push_back(index(part, INT64_MAX));
        if (made.stride->size() != made.shape.size()) bad("not strides: " + brief(one.at("stride")));
      }
      spec.tensor = std::move(made);
    }
    specs.push_back(std::move(spec));
  }
  for (const Spec& spec : specs)
    if (spec.tensor) tensors.push_back(&*spec.tensor);
  if (tree.kind != Tree::kTuple || tree.items.size() != 2 || tree.items[0].kind != Tree::kTuple ||
      tree.items[1].kind != Tree::kDict)
    bad("'tree' is not that of (args, kwargs)");
}

std::string Signature::show(const Size& size) const {
  if (size.kind == Size::kNumber) return std::to_string(size.number);
  if (size.kind == Size::kSymbol) {
    for (const TensorSpec* spec : tensors)
      for (size_t dim = 0; dim < spec->shape.size(); ++dim)
        if (spec->shape[dim].kind == Size::kSymbol && spec->shape[dim].symbol == size.symbol)
          return spec->name + ".shape[" + std::to_string(dim) + "]";
    return symbols[size.symbol];
  }
  std::string inner;
  for (const Size& arg : size.args) inner += (inner.empty() ? "" : ", ") + show(arg);
  return size.function + "(" + inner + ")";
}

std::string Signature::sizes(const TensorSpec& spec) const {
  std::string text;
  for (const Size& size : spec.shape)
    text += (text.empty() ? "" : ", ") +
        (size.kind == Size::kSymbol ? ranges[size.symbol].show() : show(size));
  return text;
}

std::string Signature::show(const TensorSpec& spec) const {
  return std::string(dtype_name(spec.dtype)) + "[" + sizes(spec) + "] on " + spec.device.str();
}

std::string Signature::show() const {
  std::string text;
  for (const TensorSpec* spec : tensors)
    text += (text.empty() ? "" : ", ") + spec->name + " " + show(*spec);
  return text;
}

std::optional<Misfit> Signature::misfit(const std::vector<at::Tensor>& given) const {
  std::vector<int64_t> known(symbols.size(), -1);
  if (!symbols.empty())
    for (size_t i = 0; i < tensors.size(); ++i)
      for (size_t dim = 0; dim < tensors[i]->shape.size(); ++dim) {
        const Size& size = tensors[i]->shape[dim];
        if (size.kind == Size::kSymbol && known[size.symbol] < 0 && given[i].defined() &&
            static_cast<int64_t>(dim) < given[i].dim())
          known[size.symbol] = given[i].size(dim);
      }
  bool writes = false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = *tensors[i];
    const at::Tensor& leaf = given[i];
    writes = writes || spec.mutated;
    const auto torch = [](at::ScalarType type) { return std::string("torch.") + dtype_name(type); };
    if (!leaf.defined())
      return Misfit{spec.name, show(spec), "an undefined tensor", "Pass a tensor."};
    if (leaf.is_nested() || leaf.layout() != spec.layout)
      return Misfit{spec.name, "a " + layout_name(spec.layout) + " tensor",
                    leaf.is_nested() ? "a nested tensor" : "layout torch." + layout_name(leaf.layout()),
                    "Pass it dense: .to_dense(), or torch.nested.to_padded_tensor(x, 0.0)."};
    if (leaf.scalar_type() != spec.dtype)
      return Misfit{spec.name, "dtype " + torch(spec.dtype), torch(leaf.scalar_type()),
                      "Convert it with .to(" + torch(spec.dtype) + "), or compile for " +
                          torch(leaf.scalar_type()) + "."};
    if (leaf.device() != spec.device)
      return Misfit{spec.name, "device " + spec.device.str(), leaf.device().str(),
                      "Move it with .to('" + spec.device.str() + "'), or compile for " +
                          leaf.device().str() + "."};
    if (leaf.dim() != static_cast<int64_t>(spec.shape.size()))
      return Misfit{spec.name, std::to_string(spec.shape.size()) + " dims (" + sizes(spec) + ")",
                      std::to_string(leaf.dim()) + " dims " + shown(leaf.sizes()),
                      "Reshape it, or compile for that rank."};
    for (size_t dim = 0; dim < spec.shape.size(); ++dim) {
      const Size& want = spec.shape[dim];
      const int64_t size = leaf.size(dim);
      std::string problem;
      if (want.kind == Size::kNumber) {
        if (size == want.number) continue;
        problem = "size " + std::to_string(want.number);
      } else if (want.kind == Size::kSymbol &&
                 (size < ranges[want.symbol].low ||
                  (ranges[want.symbol].high && size > *ranges[want.symbol].high))) {
        problem = "a size from " + ranges[want.symbol].show();
      } else {
        const auto expected = static_cast<int64_t>(evaluate(want, known));
        if (size == expected) continue;
        problem = "size " + std::to_string(expected) + " (" + show(want) + ")";
      }
      return Misfit{spec.name, problem + " in dim " + std::to_string(dim),
                      std::to_string(size) + " (shape " + shown(leaf.sizes()) + ")",
                      "Declare graft.Input(min_shape=..., max_shape=...) or gears=[...] for other sizes.",
                      true};
    }
  }
  if (writes)
    for (size_t i = 0; i < tensors.size(); ++i)
      for (size_t j = 0; tensors[i]->mutated && j < tensors.size(); ++j)
        if (i != j && given[i].layout() == at::kStrided && given[j].layout() == at::kStrided &&
            given[i].is_alias_of(given[j]) && overlap(given[i], given[j]))
          return Misfit{tensors[i]->name, "memory of its own, because the program writes to it",
                          "memory that '" + tensors[j]->name + "' has, too",
                          "Pass a copy: " + tensors[j]->name + ".clone()."};
  for (const auto& [condition, line] : guards)
    if (evaluate(condition, known) == 0) {
      std::string sizes;
      for (size_t i = 0; i < symbols.size(); ++i) {
        Size symbol;
        symbol.kind = Size::kSymbol;
        symbol.symbol = static_cast<int64_t>(i);
        if (!uses(condition, symbol.symbol)) continue;
        sizes += (sizes.empty() ? "" : ", ") + show(symbol) + " = " + std::to_string(known[i]);
      }
      return Misfit{"sizes", "sizes with " + show(condition) + " (assumed at " + line + ")",
                      sizes, "Declare such a size as a gear, or change the line that assumes it."};
    }
  return std::nullopt;
}

// --- Nested arguments and results ---

namespace {

// The structure of a value; a leaf is whatever holds no others.
Tree tree_of(const c10::IValue& value) {
  Tree tree;
  if (const auto parts = parts_of(value)) {
    tree.kind = value.isTuple() ? Tree::kTuple : Tree::kList;
    for (const c10::IValue& part : *parts) tree.items.push_back(tree_of(part));
  } else if (value.isGenericDict()) {
    tree.kind = Tree::kDict;
    for (const auto& item : value.toGenericDict()) {
      tree.keys.push_back(item.key());
      tree.items.push_back(tree_of(item.value()));
    }
  }
  return tree;
}

std::string show_tree(const Tree& tree) {
  if (tree.kind == Tree::kLeaf) return "*";
  if (tree.kind == Tree::kNone) return "None";
  if (tree.kind == Tree::kOther) return "an object of a Python class";
  std::string inner;
  for (size_t i = 0; i < tree.items.size(); ++i) {
    inner += i ? ", " : "";
    if (tree.kind == Tree::kDict) inner += show(tree.keys[i]) + ": ";
    inner += show_tree(tree.items[i]);
  }
  if (tree.kind == Tree::kDict) return "{" + inner + "}";
  if (tree.kind == Tree::kList) return "[" + inner + "]";
  return "(" + inner + (tree.items.size() == 1 ? ",)" : ")");
}

// Whether a value has the structure; its leaves, if so.
bool fits(const Tree& tree, const c10::IValue& value, Values& leaves) {
  if (tree.kind == Tree::kNone) return value.isNone();
  if (tree.kind == Tree::kLeaf) {
    leaves.push_back(value);
    return !value.isList() && !value.isTuple() && !value.isGenericDict();
  }
  if (tree.kind == Tree::kOther)
    throw InputMismatch("the program takes an object of a Python class; use forward with its tensors");
  if (tree.kind == Tree::kDict) {
    if (!value.isGenericDict() || value.toGenericDict().size() != tree.items.size()) return false;
    const auto dict = value.toGenericDict();
    for (size_t i = 0; i < tree.items.size(); ++i) {
      const auto found = dict.find(tree.keys[i]);
      if (found == dict.end() || !fits(tree.items[i], found->value(), leaves)) return false;
    }
    return true;
  }
  const auto parts = parts_of(value);
  if (!parts || parts->size() != tree.items.size()) return false;
  for (size_t i = 0; i < parts->size(); ++i)
    if (!fits(tree.items[i], (*parts)[i], leaves)) return false;
  return true;
}

// `(*, [*, *], mask=*)`
std::string show_call(const Tree& args, const Tree& kwargs) {
  std::string text;
  for (const Tree& arg : args.items) text += (text.empty() ? "" : ", ") + show_tree(arg);
  for (size_t i = 0; i < kwargs.items.size(); ++i)
    text += (text.empty() ? "" : ", ") + kwargs.keys[i].toStringRef() + "=" + show_tree(kwargs.items[i]);
  return "(" + text + ")";
}

}  // namespace

Values Signature::leaves(const c10::IValue& args, const c10::IValue& kwargs) const {
  Values found;
  if (fits(tree.items[0], args, found) && fits(tree.items[1], kwargs, found)) return found;
  throw InputMismatch(Misfit{
      "arguments", "a call like " + show_call(tree.items[0], tree.items[1]),
      show_call(tree_of(args), tree_of(kwargs)),
      "Call it with the same positional, keyword and nested arguments as declared."}.text());
}

c10::IValue unflatten(const Tree& tree, Values& leaves, size_t& next) {
  if (tree.kind == Tree::kLeaf) return leaves.at(next++);
  if (tree.kind == Tree::kNone) return {};
  if (tree.kind == Tree::kOther)
    throw Error("the program gives an object of a Python class; use forward for its tensors");
  Values items;
  for (const Tree& item : tree.items) items.push_back(unflatten(item, leaves, next));
  if (tree.kind == Tree::kTuple) return c10::ivalue::Tuple::create(std::move(items));
  if (tree.kind == Tree::kList) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (c10::IValue& item : items) list.push_back(std::move(item));
    return list;
  }
  const bool named = tree.keys.empty() || tree.keys[0].isString();
  c10::impl::GenericDict dict(
      named ? c10::TypePtr(c10::StringType::get()) : c10::TypePtr(c10::IntType::get()),
      c10::AnyType::get());
  for (size_t i = 0; i < items.size(); ++i) dict.insert(tree.keys[i], std::move(items[i]));
  return dict;
}

bool same(const c10::IValue& one, const c10::IValue& two) {
  if (one.isDouble() && two.isDouble() && std::isnan(one.toDouble())) return std::isnan(two.toDouble());
  if (one.isScalar() != two.isScalar() || one.tagKind() != two.tagKind()) return false;
  return one == two;
}

}  // namespace torchgraft
