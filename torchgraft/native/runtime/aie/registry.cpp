// What libraries registered, and how Python reaches it: operators `torchgraft_native::*` that take
// and give JSON, and one C callback through which a converter's calls go into the graph.
#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

#include <nlohmann/json.hpp>
#include <torch/csrc/jit/ir/irparser.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include "core/conversion/converters/converters.h"
#include "core/custom_pass/custom_pass.h"
#include "graft/archive.h"

namespace torch_aie::core {

using nlohmann::json;
using conversion::ConversionCtx;
using conversion::OpConverter;
using conversion::Var;

namespace {

struct Entry {
  int64_t id;
  bool subgraph;
  std::string text, library, content, problem;
  OpConverter converter;
  std::shared_mutex running;  // held shared while it runs: a library is not closed under it
};

// Never destroyed: what goes after it at exit may still unregister.
struct Registry {
  std::mutex lock;
  std::vector<std::shared_ptr<Entry>> entries;
  int64_t next = 1;
};
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

std::string library_of(const void* address) {
  Dl_info info;
  return dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
}

// The hash of a library, taken while it is loaded: its file may be another one later.
std::string content_of(const std::string& library) {
  using Stamp = std::pair<std::filesystem::file_time_type, uintmax_t>;
  static std::mutex lock;
  static auto* known = new std::map<std::pair<std::string, Stamp>, std::string>;
  std::error_code none;
  const Stamp stamp{std::filesystem::last_write_time(library, none),
                    std::filesystem::file_size(library, none)};
  std::lock_guard<std::mutex> hold(lock);
  const auto [found, is_new] = known->try_emplace({library, stamp});
  if (is_new) {
    std::ifstream file(library, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    if (file && !bytes.empty()) found->second = torchgraft::sha256(bytes);
  }
  return found->second;
}

// What is wrong with a text; empty where nothing is.
std::string problem_of(const std::string& text, bool subgraph) {
  try {
    if (subgraph) {
      torch::jit::Graph graph;
      std::unordered_map<std::string, torch::jit::Value*> names;
      torch::jit::parseIR(text, &graph, names);
    } else {
      torch::jit::parseSchemaOrName(text);
    }
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

Registration& Registration::operator=(Registration&& other) noexcept {
  std::swap(ids_, other.ids_);
  return *this;
}

void Registration::add(
    std::string text, OpConverter converter, bool subgraph, const void* caller) {
  auto entry = std::make_shared<Entry>();
  entry->subgraph = subgraph;
  entry->library = library_of(caller);
  entry->content = content_of(entry->library);
  // Raising here would end the process: this runs while a library is loaded. Python says it later.
  entry->problem = problem_of(text, subgraph);
  entry->text = std::move(text);
  entry->converter = std::move(converter);
  std::lock_guard<std::mutex> hold(registry().lock);
  entry->id = registry().next++;
  ids_.push_back(entry->id);
  registry().entries.push_back(std::move(entry));
}

Registration::~Registration() {
  for (int64_t id : ids_) {
    std::shared_ptr<Entry> gone;
    {
      std::lock_guard<std::mutex> hold(registry().lock);
      auto& entries = registry().entries;
      for (auto it = entries.begin(); it != entries.end(); ++it) {
        if ((*it)->id == id) {
          gone = *it;
          entries.erase(it);
          break;
        }
      }
    }
    if (gone) {
      std::unique_lock<std::shared_mutex> wait(gone->running);
      gone->converter = nullptr;  // its code goes with the library
    }
  }
}

conversion::converters::RegisterNodeConverters&&
conversion::converters::RegisterNodeConverters::pattern(
    const std::string& schema, OpConverter converter) && {
  add(schema, std::move(converter), false, __builtin_return_address(0));
  return std::move(*this);
}

custom_pass::RegisterSubgraphConverters&& custom_pass::RegisterSubgraphConverters::pattern(
    const std::string& graph, OpConverter converter) && {
  add(graph, std::move(converter), true, __builtin_return_address(0));
  return std::move(*this);
}

// --- One conversion ---

namespace conversion {

// The graph on the Python side. A request goes through `callback`, which leaves its answer with
// `torchgraft_native::answer` before it returns.
struct Session : AscendIE::Graph {
  using Callback = int (*)(const char*);

  explicit Session(Callback callback, std::vector<at::Tensor> tensors)
      : callback(callback), tensors(std::move(tensors)), net(*this) {}

  Callback callback;
  std::vector<at::Tensor> tensors;  // of both sides, by number
  std::string answer;
  AscendIE::Network net;
  std::shared_ptr<torch::jit::Graph> graph = std::make_shared<torch::jit::Graph>();

  static Session*& current() {
    static thread_local Session* session = nullptr;
    return session;
  }

  json ask(const json& request) {
    answer.clear();
    const std::string text = request.dump();
    if (callback(text.c_str()) != 0 || answer.empty())
      throw std::runtime_error("the compiler gave no answer to " + text);
    json said = json::parse(answer);
    if (said.contains("error")) throw std::runtime_error(said["error"].get<std::string>());
    return said;
  }

  static Made made(const json& value) {
    return {value.at("v"), value.at("shape").get<std::vector<int64_t>>(),
            static_cast<at::ScalarType>(value.at("dtype").get<int>())};
  }

  json encoded(const c10::IValue& value) {
    if (value.isNone()) return nullptr;
    if (value.isBool()) return value.toBool();
    if (value.isInt()) return value.toInt();
    if (value.isDouble()) return {{"f", encoded_double(value.toDouble())}};
    if (value.isString()) return value.toStringRef();
    if (value.isDevice()) return {{"device", value.toDevice().str()}};
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
      return {{"c", tensors.size() - 1}};
    }
    if (value.isList()) {
      json list = json::array();
      for (const c10::IValue& item : value.toListRef()) list.push_back(encoded(item));
      return list;
    }
    throw std::invalid_argument("an attribute of type " + value.tagKind() + " cannot be passed on");
  }

  static std::string encoded_double(double value) {
    char text[40];
    snprintf(text, sizeof text, "%.17g", value);
    return text;
  }

  json encoded(const AscendIE::Argument& arg) {
    switch (arg.kind) {
      case AscendIE::Argument::kTensor:
        return {{"v", net.Id(arg.tensors[0])}};
      case AscendIE::Argument::kList: {
        json list = json::array();
        for (auto* tensor : arg.tensors) list.push_back({{"v", net.Id(tensor)}});
        return list;
      }
      case AscendIE::Argument::kType:
        return {{"dtype", arg.value.toInt()}};
      default:
        return encoded(arg.value);
    }
  }

  std::vector<Made> Call(
      const std::string& op, const std::vector<AscendIE::Argument>& args,
      const AscendIE::Attributes& named) override {
    json request = {{"op", op}, {"args", json::array()}, {"kwargs", json::object()}};
    for (const auto& arg : args) request["args"].push_back(encoded(arg));
    for (const auto& [name, arg] : named) request["kwargs"][name] = encoded(arg);
    const json said = ask(request);
    std::vector<Made> results;
    for (const json& value : said.at("values")) results.push_back(made(value));
    return results;
  }

  Made Constant(const at::Tensor& values) override {
    tensors.push_back(values);
    return made(ask({{"constant", tensors.size() - 1}}).at("values").at(0));
  }

  // An argument as Python describes it, with the value that stands for it in the node.
  std::pair<Var, torch::jit::Value*> decoded(const json& arg) {
    if (arg.is_object() && arg.contains("v")) {
      AscendIE::Tensor* tensor = net.Given(made(arg), true);
      std::vector<std::optional<int64_t>> sizes;
      for (int64_t size : arg.at("shape").get<std::vector<int64_t>>())
        sizes.push_back(size < 0 ? std::nullopt : std::optional<int64_t>(size));
      torch::jit::Value* value = graph->addInput();
      value->setType(c10::TensorType::create(
          static_cast<at::ScalarType>(arg.at("dtype").get<int>()), at::Device(at::kCPU),
          c10::SymbolicShape(sizes), c10::VaryingShape<c10::Stride>(sizes.size()), std::nullopt));
      if (arg.contains("c")) return {Var(tensor, tensors.at(arg.at("c"))), value};
      return {Var(tensor), value};
    }
    if (arg.is_object() && arg.contains("unknown")) {
      torch::jit::Value* value = graph->addInput();
      value->setType(c10::IntType::get());
      return {Var::unknown(arg.at("unknown")), value};
    }
    if (arg.is_array() && has_tensor(arg)) {
      Var list = Var::unknown("a list of tensors");
      std::vector<torch::jit::Value*> values;
      for (const json& item : arg) {
        auto [var, value] = decoded(item);
        list.items_.push_back(std::move(var));
        values.push_back(value);
      }
      auto* node = graph->insertNode(graph->createList(
          arg.dump().find("null") == std::string::npos
              ? c10::TypePtr(c10::TensorType::get())
              : c10::TypePtr(c10::OptionalType::create(c10::TensorType::get())), values));
      return {std::move(list), node->output()};
    }
    c10::IValue value = plain(arg);
    return {Var(value), graph->insertConstant(value)};
  }

  static bool has_tensor(const json& list) {
    for (const json& item : list)
      if (item.is_object() && (item.contains("v") || item.contains("unknown"))) return true;
    return false;
  }

  c10::IValue plain(const json& arg) {
    if (arg.is_null()) return {};
    if (arg.is_boolean()) return arg.get<bool>();
    if (arg.is_number_integer()) return arg.get<int64_t>();
    if (arg.is_string()) return arg.get<std::string>();
    if (arg.is_object() && arg.contains("f")) return std::strtod(arg.at("f").get<std::string>().c_str(), nullptr);
    if (arg.is_object() && arg.contains("c")) return tensors.at(arg.at("c"));
    if (arg.is_object() && arg.contains("device")) return at::Device(arg.at("device").get<std::string>());
    if (arg.is_array()) {
      if (arg.empty() || arg[0].is_number_integer()) return arg.get<std::vector<int64_t>>();
      if (arg[0].is_boolean()) {
        c10::List<bool> list;
        for (const json& item : arg) list.push_back(item.get<bool>());
        return list;
      }
      std::vector<double> list;
      for (const json& item : arg) list.push_back(plain(item).toScalar().toDouble());
      return list;
    }
    throw std::invalid_argument("an argument that C++ has no type for");
  }
};

}  // namespace conversion

namespace {

using conversion::Session;

struct Current {  // sessions nest where a converter compiles something itself
  explicit Current(Session* session) : before(Session::current()) { Session::current() = session; }
  ~Current() { Session::current() = before; }
  Session* before;
};

std::string registered() {
  json list = json::array();
  std::lock_guard<std::mutex> hold(registry().lock);
  for (const auto& entry : registry().entries)
    list.push_back({{"id", entry->id}, {"subgraph", entry->subgraph}, {"text", entry->text},
                    {"library", entry->library}, {"content", entry->content}, {"problem", entry->problem}});
  return list.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string run(Entry& entry, const json& call, Session& session) {
  conversion::converters::args args;
  std::vector<torch::jit::Value*> inputs;
  for (const json& arg : call.at("args")) {
    auto [var, value] = session.decoded(arg);
    args.push_back(std::move(var));
    inputs.push_back(value);
  }
  const size_t count = call.at("results").size();
  auto* node = session.graph->insertNode(session.graph->create(
      c10::Symbol::fromQualString(call.at("kind").get<std::string>()), inputs, count));
  for (size_t i = 0; i < count; ++i) node->outputs()[i]->setType(c10::TensorType::get());
  const std::string line = call.value("line", "");
  node->setSourceRange(torch::jit::SourceRange(
      std::make_shared<torch::jit::Source>(line), 0, line.size()));

  ConversionCtx ctx;
  ctx.net = &session.net;
  if (!entry.converter(&ctx, node, args)) return json{{"refused", "it returned false"}}.dump();

  json results = json::array();
  for (size_t i = 0; i < count; ++i) {
    const auto found = ctx.results.find(node->outputs()[i]);
    AscendIE::Tensor* made = found != ctx.results.end() ? found->second
        : static_cast<int64_t>(i) < session.net.GetOutputNum() ? session.net.GetOutput(i)
                                                               : nullptr;
    if (made == nullptr && call.at("results")[i].get<bool>())
      return json{{"refused", "it associated nothing with output " + std::to_string(i)}}.dump();
    results.push_back(made ? json(session.net.Id(made)) : json());
  }
  return json{{"results", results}}.dump();
}

std::string convert(
    int64_t id, const std::string& call, std::vector<at::Tensor> tensors, int64_t callback) {
  std::shared_ptr<Entry> entry;
  {
    std::lock_guard<std::mutex> hold(registry().lock);
    for (const auto& one : registry().entries)
      if (one->id == id) entry = one;
  }
  if (!entry) return json{{"refused", "its library was closed"}}.dump();
  std::shared_lock<std::shared_mutex> running(entry->running);
  if (!entry->converter) return json{{"refused", "its library was closed"}}.dump();
  Session session(reinterpret_cast<Session::Callback>(callback), std::move(tensors));
  Current current(&session);
  const auto refused = [](const std::string& why) {
    return json{{"refused", why}}.dump(-1, ' ', false, json::error_handler_t::replace);
  };
  try {
    return run(*entry, json::parse(call), session);
  } catch (const c10::Error& error) {
    return refused(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return refused(error.what());
  } catch (...) {
    return refused("it threw something that is no std::exception");
  }
}

Session& session() {
  if (Session::current() == nullptr) throw std::logic_error("no conversion is under way");
  return *Session::current();
}

}  // namespace

TORCH_LIBRARY(torchgraft_native, m) {
  m.def("registered() -> str", &registered);
  m.def("convert(int id, str call, Tensor[] tensors, int callback) -> str", &convert);
  m.def("answer(str text) -> ()", [](const std::string& text) { session().answer = text; });
  m.def("held(int number) -> Tensor", [](int64_t number) {
    return session().tensors.at(static_cast<size_t>(number));
  });
}

}  // namespace torch_aie::core
