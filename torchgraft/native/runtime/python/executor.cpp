// The executor for Python: a module whose functions give functions.
//
//   run = link(text, number, values, programs, libraries, device)
//   run = capture(program, device, fixed, written, alias_outputs, refused)
//   outputs = run(inputs)
//   fits = check([(dtype, device, sizes, strides, format), ...])
//   yes = fits(args)
//
// `text` is an entry of `programs` as a package has it, `values` are the tensors it is bound to,
// `programs` the runs of the entries before it. `program` is such a function, of Python's; see
// graft/capture.h for what it is captured with. The list of inputs is emptied.
#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "graft/capture.h"

namespace {

using torchgraft::Linked;
using torchgraft::Values;

constexpr const char* kName = "torchgraft.run";
using Shared = std::shared_ptr<Linked>;

c10::IValue from_python(PyObject* given) {
  if (THPVariable_Check(given)) return THPVariable_Unpack(given);
  if (given == Py_None) return {};
  if (PyBool_Check(given)) return given == Py_True;
  if (PyLong_Check(given)) return py::cast<int64_t>(py::handle(given));
  if (PyFloat_Check(given)) return PyFloat_AS_DOUBLE(given);
  throw py::type_error(std::string("a program takes tensors and numbers, got ") + Py_TYPE(given)->tp_name);
}

PyObject* to_python(const c10::IValue& value) {
  if (value.isTensor()) return THPVariable_Wrap(value.toTensor());
  if (value.isNone()) return Py_NewRef(Py_None);
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return PyComplex_FromDoubles(number.real(), number.imag());
  }
  if (!value.isList() && !value.isTuple())
    throw py::type_error("a program gives " + value.tagKind());
  const bool tuple = value.isTuple();
  const Values items = tuple ? Values(value.toTupleRef().elements().begin(), value.toTupleRef().elements().end())
                             : value.toListRef().vec();
  py::object made = tuple ? py::object(py::tuple(items.size())) : py::object(py::list(items.size()));
  for (size_t i = 0; i < items.size(); ++i) {
    PyObject* item = to_python(items[i]);
    if (!item) throw python_error();
    tuple ? PyTuple_SET_ITEM(made.ptr(), i, item) : PyList_SET_ITEM(made.ptr(), i, item);
  }
  return made.release().ptr();
}

Shared& linked_of(PyObject* capsule) { return *static_cast<Shared*>(PyCapsule_GetPointer(capsule, kName)); }

PyObject* run(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(given)) throw py::type_error("a program takes a list of inputs");
  Values inputs;
  inputs.reserve(PyList_GET_SIZE(given));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i)
    inputs.push_back(from_python(PyList_GET_ITEM(given, i)));
  if (PyList_SetSlice(given, 0, PyList_GET_SIZE(given), nullptr) < 0) throw python_error();
  Values outputs;
  {
    const pybind11::gil_scoped_release none;
    outputs = linked_of(self)->run(std::move(inputs));
  }
  py::list made(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyObject* item = to_python(outputs[i]);
    if (!item) throw python_error();
    PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), item);
  }
  return made.release().ptr();
  END_HANDLE_TH_ERRORS
}

void drop(PyObject* capsule) {
  auto* held = &linked_of(capsule);
  const pybind11::gil_scoped_release none;  // the threads of its streams end here
  delete held;
}

// A program that Python runs.
class Called : public Linked {
 public:
  explicit Called(py::object program) : program_(std::move(program)) {}

  ~Called() override {
    const pybind11::gil_scoped_acquire hold;
    program_ = py::object();
  }

  Values run(Values inputs) override {
    const pybind11::gil_scoped_acquire hold;
    py::list given(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
      PyList_SET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i), to_python(inputs[i]));
    inputs.clear();
    Values outputs;
    for (const py::handle made : program_(given)) outputs.push_back(from_python(made.ptr()));
    return outputs;
  }

 private:
  py::object program_;
};

PyMethodDef kRun = {"run", run, METH_O, "Run a program: the list of its inputs in, its outputs out."};

py::object function(Shared linked) {
  const auto capsule =
      py::reinterpret_steal<py::object>(PyCapsule_New(new Shared(std::move(linked)), kName, drop));
  if (!capsule) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&kRun, capsule.ptr()));
}

py::object link_part(
    const std::string& text, size_t number, const std::vector<at::Tensor>& values,
    const std::vector<py::object>& programs, const std::map<std::string, std::string>& libraries,
    const std::string& device) {
  std::vector<Shared> linked;
  for (const py::object& one : programs) linked.push_back(linked_of(PyCFunction_GET_SELF(one.ptr())));
  const torchgraft::Place place{c10::Device(device)};
  const auto part = torchgraft::parse_part(
      torchgraft::json::parse(text), number, values.size(), place, libraries);
  return function(torchgraft::link(part, Values(values.begin(), values.end()), linked, place.device));
}

py::object capture(
    py::object program, const std::string& device, const std::set<size_t>& fixed,
    const std::set<size_t>& written, bool alias_outputs, py::object refused) {
  const auto tell = [refused = std::make_shared<py::object>(std::move(refused))](const std::string& why) {
    const pybind11::gil_scoped_acquire hold;
    (*refused)(why);
  };
  return function(torchgraft::captured(
      std::make_shared<Called>(std::move(program)), c10::Device(device), {fixed, written, alias_outputs}, tell));
}

// What a tensor must be to be taken as it is.
struct Wanted {
  at::ScalarType dtype;
  c10::Device device;
  std::vector<int64_t> sizes;                   // -1: any
  std::optional<std::vector<int64_t>> strides;  // or it is contiguous in the format
  at::MemoryFormat format;

  bool fits(PyObject* given) const {
    if (Py_TYPE(given) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(given);
    if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.scalar_type() != dtype ||
        tensor.device() != device || tensor.requires_grad() || tensor.is_conj() || tensor.is_neg())
      return false;
    const at::IntArrayRef found = tensor.sizes();
    return found.size() == sizes.size() &&
           std::equal(found.begin(), found.end(), sizes.begin(),
                      [](int64_t is, int64_t must) { return must == -1 || is == must; }) &&
           (strides ? tensor.strides() == *strides : tensor.is_contiguous(format));
  }
};

using Row = std::vector<Wanted>;
constexpr const char* kRow = "torchgraft.fits";

// Whether nothing changes what calls of torch do: autocast, vmap and the like.
bool is_plain() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset) &&
         at::functorch::getDynamicLayerStack().empty();
}

PyObject* fits(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  const Row& row = *static_cast<Row*>(PyCapsule_GetPointer(self, kRow));
  if (!PyTuple_Check(given)) throw py::type_error("a call's arguments are a tuple");
  bool good = PyTuple_GET_SIZE(given) == static_cast<Py_ssize_t>(row.size()) && is_plain();
  for (size_t i = 0; good && i < row.size(); ++i) good = row[i].fits(PyTuple_GET_ITEM(given, i));
  return PyBool_FromLong(good);
  END_HANDLE_TH_ERRORS
}

PyMethodDef kFits = {"fits", fits, METH_O, "Whether arguments are plain tensors as declared."};

py::object check(const std::vector<std::tuple<at::ScalarType, c10::Device, std::vector<int64_t>,
                                              std::optional<std::vector<int64_t>>, at::MemoryFormat>>& wanted) {
  auto row = std::make_unique<Row>();
  for (const auto& [dtype, device, sizes, strides, format] : wanted)
    row->push_back({dtype, device, sizes, strides, format});
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(row.get(), kRow, [](PyObject* held) {
    delete static_cast<Row*>(PyCapsule_GetPointer(held, kRow));
  }));
  if (!capsule) throw py::error_already_set();
  row.release();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&kFits, capsule.ptr()));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Plans walked by C++.";
  module.def("link", &link_part);
  module.def("capture", &capture);
  module.def("check", &check);
  module.attr("captures") = torchgraft::captures();
}
