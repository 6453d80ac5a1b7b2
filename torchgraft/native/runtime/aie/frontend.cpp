// The front end: checks the spec, hands the module to a Python, and loads what it made.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <stdexcept>

#include <nlohmann/json.hpp>
#include <torch/csrc/jit/serialization/import.h>

#include "graft/engine.h"
#include "graft/folder.h"
#include "torch_aie.h"

namespace torch_aie {
namespace {

using torchgraft::Folder;

using nlohmann::json;

[[noreturn]] void refuse(const std::string& what, const std::string& got, const std::string& want) {
  throw std::invalid_argument(what + ": expected " + want + ", got " + got);
}

void check_shape(const std::vector<int64_t>& shape, int64_t least, const char* what) {
  if (shape.size() > 8) refuse(what, std::to_string(shape.size()) + " dims", "at most 8");
  for (int64_t size : shape)
    if (size < least) refuse(what, std::to_string(size), "sizes of " + std::to_string(least) + " or more");
}

// --- Python ---

struct Found {
  std::string library, prefix, torch, torchgraft;
  std::vector<std::string> path;
};

// The folder of the torch that this program is linked with; empty where the linker cannot say.
std::filesystem::path own_torch() {
  Dl_info here;
  std::error_code ignored;
  if (!dladdr(reinterpret_cast<void*>(&c10::warn), &here) || !here.dli_fname) return {};
  return std::filesystem::canonical(here.dli_fname, ignored).parent_path().parent_path();
}

// The Python that torch was installed for, `<root>/lib/pythonX/site-packages/torch`, else the path's.
std::string default_python() {
  std::filesystem::path root = own_torch();
  for (int up = 0; up < 4; ++up) root = root.parent_path();
  const std::filesystem::path python = root / "bin" / "python3";
  return access(python.c_str(), X_OK) == 0 ? python.string() : "python3";
}

// Asks a Python where its library is; it is not run for anything else.
Found find_python() {
  const char* given = getenv("TORCHGRAFT_PYTHON");
  const std::string python = given ? given : default_python();
  if (python.find('\'') != std::string::npos) refuse("TORCHGRAFT_PYTHON", python, "a path without quotes");
  const std::string ask = "'" + python + R"(' -c '
import glob, importlib.util, json, os, sys, sysconfig
v = sysconfig.get_config_var
names = [v("INSTSONAME"), v("LDLIBRARY")]
folders = [v("LIBDIR"), v("LIBPL"), os.path.join(sys.base_prefix, "lib"), "/usr/lib/x86_64-linux-gnu"]
paths = [os.path.join(f, n) for f in folders for n in names if f and n and ".so" in n]
found = next(filter(os.path.exists, paths), "")
def folder(name):
  spec = importlib.util.find_spec(name)
  return os.path.dirname(spec.origin) if spec and spec.origin else ""
print(json.dumps({"library": found, "prefix": sys.base_prefix, "path": [p for p in sys.path if p],
  "torch": folder("torch"), "torchgraft": folder("torchgraft")}))' 2>/dev/null)";
  std::string said;
  if (FILE* pipe = popen(ask.c_str(), "r")) {
    char part[4096];
    while (const size_t count = fread(part, 1, sizeof part, pipe)) said.append(part, count);
    pclose(pipe);
  }
  const json answer = json::parse(said, nullptr, false);
  const std::string fix = " Set TORCHGRAFT_PYTHON to the python that has torchgraft installed.";
  if (!answer.is_object())
    throw std::runtime_error("compiling needs a Python, and '" + python + "' does not run." + fix);
  Found found{
      answer.at("library"), answer.at("prefix"), answer.at("torch"), answer.at("torchgraft"),
      answer.at("path")};
  if (found.library.empty())
    throw std::runtime_error(
        "compiling needs a Python with a shared library (libpython), and '" + python +
        "' was built without one." + fix);
  if (found.torch.empty())
    throw std::runtime_error("compiling needs torch in '" + python + "', which has none." + fix);
  std::error_code ignored;
  const auto own = own_torch();
  if (!own.empty() && own != std::filesystem::canonical(found.torch, ignored))
    throw std::runtime_error(
        "this program runs with the torch of " + own.string() + ", and '" + python + "' has that of " +
        found.torch + ": one process cannot hold both." + fix);
  if (found.torchgraft.empty())
    throw std::runtime_error("compiling needs torchgraft in '" + python + "', which has none." + fix);
  // An editable install is found by a hook of that Python, which is not in this process.
  found.path.push_back(std::filesystem::path(found.torchgraft).parent_path().string());
  return found;
}

// The few functions of libpython that are needed; looked up when the program runs.
struct Python {
  int (*is_initialized)();
  void (*initialize)(int);
  void* (*save_thread)();
  int (*ensure)();
  void (*release)(int);
  int (*run)(const char*, void*);

  explicit Python(void* handle) {
    get(handle, "Py_IsInitialized", is_initialized);
    get(handle, "Py_InitializeEx", initialize);
    get(handle, "PyEval_SaveThread", save_thread);
    get(handle, "PyGILState_Ensure", ensure);
    get(handle, "PyGILState_Release", release);
    get(handle, "PyRun_SimpleStringFlags", run);
  }

  template <typename F>
  static void get(void* handle, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (!function) throw std::runtime_error(std::string("libpython has no ") + name);
  }

  void execute(const std::string& code) {
    const int state = ensure();
    const int failed = run(code.c_str(), nullptr);
    release(state);
    if (failed) throw std::runtime_error("the Python that compiles failed; it said why on stderr");
  }
};

// The Python that runs in this process; null where there is none.
std::unique_ptr<Python> running() {
  if (!dlsym(RTLD_DEFAULT, "Py_IsInitialized")) return nullptr;
  auto own = std::make_unique<Python>(RTLD_DEFAULT);
  return own->is_initialized() ? std::move(own) : nullptr;
}

// Never ended: modules of Python that were imported cannot be imported twice.
Python& python() {
  static std::mutex lock;
  static Python* made = nullptr;
  std::lock_guard<std::mutex> hold(lock);
  if (made) return *made;
  if (auto own = running()) return *(made = own.release());
  const Found found = find_python();
  // Global, because extension modules of Python find its symbols there.
  void* handle = dlopen(found.library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!handle) throw std::runtime_error(std::string("libpython does not load: ") + dlerror());
  auto started = std::make_unique<Python>(handle);
  const char* before = getenv("PYTHONHOME");
  if (!before) setenv("PYTHONHOME", found.prefix.c_str(), 1);
  // torch reads its own files in the locale's encoding, and a Python that is embedded does not, as
  // `python3` does, take C (no LANG, as in a container) for UTF-8. Python 3.15 always means UTF-8.
  if (void* utf8 = dlsym(handle, "Py_UTF8Mode")) *static_cast<int*>(utf8) = 1;
  started->initialize(0);  // 0: signals stay this program's
  if (!before) unsetenv("PYTHONHOME");
  started->save_thread();
  made = started.release();
  made->execute(
      "import sys\nfor _p in " + json(found.path).dump() + ":\n    _p in sys.path or sys.path.append(_p)\n");
  return *made;
}

// The type to compute in, as `Config.precision` names it; null: as the module says.
json precision(const torchscript::CompileSpec& spec) {
  switch (spec.precision_policy) {
    case PrecisionPolicy::FP16: return "float16";
    case PrecisionPolicy::PREF_FP16: return "mixed-float16";
    case PrecisionPolicy::FP32: return "float32";
    case PrecisionPolicy::PREF_FP32: break;
  }
  return spec.truncateLongAndDouble ? json("float32") : json();
}

json described(const torchscript::CompileSpec& spec) {
  if (spec.inputs.empty() || spec.inputs[0].empty())
    refuse("CompileSpec", "no inputs", "the inputs to compile for");
  if (spec.minBlockSize < 1 || spec.minBlockSize > 1024)
    refuse("CompileSpec.minBlockSize", std::to_string(spec.minBlockSize), "1 to 1024");
  if (spec.optimizationLevel < 0 || spec.optimizationLevel > 2)
    refuse("CompileSpec.optimizationLevel", std::to_string(spec.optimizationLevel), "0, 1 or 2");
  for (int64_t size : spec.defaultBufferSizeVec)
    if (size < 1 || size > 36864)
      refuse("CompileSpec.defaultBufferSizeVec", std::to_string(size), "1 to 36864 (MB)");
  json gears = json::array();
  for (const auto& inputs : spec.inputs) {
    if (inputs.size() != spec.inputs[0].size())
      refuse("CompileSpec", "gears with other numbers of inputs", "as many in each");
    json gear = json::array();
    for (const Input& input : inputs) {
      const int dtype = static_cast<int>(AscendIE::toScalarType(input.dtype));
      json one = {{"dtype", dtype}};
      if (input.IsShapeRange()) {
        if (spec.inputs.size() > 1) refuse("CompileSpec", "a range in a gear", "shapes");
        one["min"] = input.minShape;
        one["max"] = input.maxShape;
      } else {
        one["shape"] = input.shape;
      }
      gear.push_back(one);
    }
    gears.push_back(gear);
  }
  return {{"inputs", gears},
          {"min_block_size", spec.minBlockSize},
          {"require_full_compilation", spec.requireFullCompilation},
          {"precision", precision(spec)},
          {"torch_executed_ops", spec.torchExecutedOps},
          {"torch_executed_modules", spec.torchExecutedModules}};
}

// Compiles, and leaves `module.pt` and `program.graft` in the folder.
void compile_in(
    const Folder& folder, const torch::jit::Module& module, const torchscript::CompileSpec& spec) {
  const json request = described(spec);
  Python& found = python();
  module.save(folder.path + "/given.pt");
  std::ofstream(folder.path + "/request.json") << request;
  found.execute(
      "from torchgraft.native.frontend import serve as _serve\n_serve(" + json(folder.path).dump() + ")\n");
  std::ifstream file(folder.path + "/answer.json");
  const json answer = json::parse(file, nullptr, false);
  if (!answer.is_object()) throw std::runtime_error("the Python that compiles gave no answer");
  if (answer.contains("error")) throw std::runtime_error(answer.at("error").get<std::string>());
}

}  // namespace

Input::Input(std::vector<int64_t> shape, TensorFormat format)
    : Input(std::move(shape), DataType::FLOAT, format) {}

Input::Input(std::vector<int64_t> shape, DataType type, TensorFormat format)
    : shape(std::move(shape)), dtype(type), format(format) {
  check_shape(this->shape, 0, "Input.shape");
}

Input::Input(std::vector<int64_t> min, std::vector<int64_t> max, TensorFormat format)
    : Input(std::move(min), std::move(max), DataType::FLOAT, format) {}

Input::Input(std::vector<int64_t> min, std::vector<int64_t> max, DataType type, TensorFormat format)
    : minShape(std::move(min)), maxShape(std::move(max)), dtype(type), format(format), range(true) {
  check_shape(minShape, -1, "Input.minShape");
  check_shape(maxShape, -1, "Input.maxShape");
  if (minShape.size() != maxShape.size())
    refuse("Input.maxShape", std::to_string(maxShape.size()) + " sizes", "as many as in minShape");
  for (size_t i = 0; i < minShape.size(); ++i)
    if ((minShape[i] < 0) != (maxShape[i] < 0) || minShape[i] > maxShape[i])
      refuse("Input.maxShape", std::to_string(maxShape[i]), "no less than in minShape; -1 in both or none");
}

void set_device(int32_t id) {
  if (id < 0 || id > 1024) refuse("set_device", std::to_string(id), "a number from 0 to 1024");
}

// Programs are held by C++, and by Python where that ran them before this library was loaded.
void finalize() {
  torchgraft::forget_engines();
  if (const auto own = running())
    own->execute(
        "import sys as _sys\n_held = _sys.modules.get('torchgraft.package.script')\n"
        "if _held is not None:\n    _held.forget_engines()\n");
}

namespace torchscript {

torch::jit::Module compile(const torch::jit::Module& module, const CompileSpec& spec) {
  Folder folder;
  compile_in(folder, module, spec);
  return torch::jit::load(folder.path + "/module.pt");
}

std::string export_engine(
    const torch::jit::Module& module, const std::string& method_name, const CompileSpec& spec) {
  if (method_name != "forward") refuse("export_engine", method_name, "'forward'");
  Folder folder;
  compile_in(folder, module, spec);
  std::ifstream file(folder.path + "/program.graft", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace torchscript
}  // namespace torch_aie
