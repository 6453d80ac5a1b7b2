#include "graft/weights.h"

#include <set>

#include <ATen/ATen.h>

#include "graft/signature.h"

namespace torchgraft {
namespace {

const std::map<std::string, at::ScalarType>& stored_types() {
  static const std::map<std::string, at::ScalarType> table = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16},
      {"I64", at::kLong}, {"I32", at::kInt}, {"I16", at::kShort}, {"I8", at::kChar},
      {"U64", at::kUInt64}, {"U32", at::kUInt32}, {"U16", at::kUInt16}, {"U8", at::kByte},
      {"BOOL", at::kBool}, {"C64", at::kComplexFloat}, {"F8_E4M3", at::kFloat8_e4m3fn},
      {"F8_E5M2", at::kFloat8_e5m2}};
  return table;
}

std::string typed_shape(at::ScalarType type, at::IntArrayRef shape) {
  return std::string("torch.") + dtype_name(type) + " " + shown(shape);
}

}  // namespace

std::map<std::string, at::Tensor> read_tensors(
    std::string_view data, const std::shared_ptr<Archive>& owner) {
  uint64_t length = 0;
  if (data.size() >= 8) std::memcpy(&length, data.data(), 8);
  if (data.size() < 8 || length > data.size() - 8 || length > uint64_t{100} << 20)
    bad("the weights are cut off");
  json header;
  try {
    header = json::parse(data.begin() + 8, data.begin() + 8 + length);
  } catch (const json::exception& error) {
    bad(std::string("the header of the weights is not JSON (") + error.what() + ")");
  }
  if (!header.is_object()) bad("the header of the weights is not an object");
  const std::string_view content = data.substr(8 + length);
  std::map<std::string, at::Tensor> found;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__" || name.rfind(".pad", 0) == 0) continue;
    const auto type = stored_types().find(text(entry, "dtype"));
    const json& offsets = list(entry, "data_offsets");
    if (type == stored_types().end() || offsets.size() != 2)
      bad("weight " + quote(name) + " has no known type");
    std::vector<int64_t> shape;
    uint64_t bytes = c10::elementSize(type->second);
    for (const json& size : list(entry, "shape")) {
      shape.push_back(index(size, INT64_MAX));
      if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(shape.back()), &bytes)) bytes = UINT64_MAX;
    }
    const int64_t end = static_cast<int64_t>(content.size()) + 1;
    const int64_t start = index(offsets[0], end), stop = index(offsets[1], end);
    if (stop < start || static_cast<uint64_t>(stop - start) != bytes)
      bad("weight " + quote(name) + " has another size than its shape says");
    if (bytes == 0) {
      found[name] = at::empty(shape, type->second);
      continue;
    }
    const char* at = content.data() + start;
    if (reinterpret_cast<uintptr_t>(at) % c10::elementSize(type->second))
      bad("weight " + quote(name) + " is not aligned");
    found[name] = at::from_blob(
        const_cast<char*>(at), shape, [owner](void*) {}, at::TensorOptions(type->second));
  }
  return found;
}

Weight::Weight(const json& data)
    : name(text(data, "name")), kind(text(data, "kind")), tensor(text(data, "tensor")),
      device(text(data, "device")), dtype(dtype_named(text(data, "dtype"))),
      saved(flag(data, "saved")), made(data.contains("made") && flag(data, "made")) {
  for (const json& size : list(data, "shape")) shape.push_back(index(size, INT64_MAX));
  for (const json& step : list(data, "stride")) stride.push_back(index(step, INT64_MAX));
  if (shape.size() != stride.size()) bad("weight " + quote(name) + " has other strides than sizes");
}

std::string Weight::place() const {
  std::string text = tensor + " " + device;
  for (int64_t step : stride) text += " " + std::to_string(step);
  return text;
}

at::Tensor Weight::like(const at::Tensor& given, const Place& place) const {
  const at::Tensor moved = given.detach().to(place(device));
  if (moved.strides() == stride) return moved;
  __int128 reach = 1;
  for (size_t i = 0; i < shape.size(); ++i)
    if (shape[i]) reach += static_cast<__int128>(shape[i] - 1) * stride[i];
  if (reach > std::max<__int128>(1, given.numel()))
    bad("weight " + quote(name) + " has strides that do not fit its size");
  return at::empty_strided(shape, stride, moved.options()).copy_(moved);
}

void check_weights(const std::vector<Weight>& weights, const Weights& given) {
  std::set<std::string> problems, known;  // both in order
  size_t made = 0;
  for (const Weight& weight : weights) {
    made += weight.made;
    if (!weight.saved) continue;
    known.insert(weight.name);
    const auto found = given.find(weight.name);
    if (found == given.end())
      problems.insert("missing: " + weight.name);
    else if (!found->second.defined())
      problems.insert(weight.name + ": an undefined tensor");
    else if (found->second.layout() != at::kStrided)
      problems.insert(weight.name + ": layout torch." + layout_name(found->second.layout()) +
                      " for torch.strided");
    else if (found->second.is_meta())
      problems.insert(weight.name + ": it has no values (device meta)");
    else if (found->second.scalar_type() != weight.dtype || found->second.sizes() != weight.shape)
      problems.insert(weight.name + ": " + typed_shape(found->second.scalar_type(), found->second.sizes()) +
                      " for " + typed_shape(weight.dtype, weight.shape));
  }
  for (const auto& [name, tensor] : given)
    if (!known.count(name)) problems.insert("not in the program: " + name);
  if (problems.empty() && made)
    problems.insert(std::to_string(made) +
                    " constants were made of the weights by a pass, in a way that cannot be repeated; "
                    "compile the model with the new weights and save that");
  if (problems.empty()) {
    std::map<std::string, std::string> first;
    for (const Weight& weight : weights) {
      if (!weight.saved) continue;
      const std::string& other = first.emplace(weight.tensor, weight.name).first->second;
      if (!at::equal(given.at(other), given.at(weight.name))) {
        problems.insert(other + " and " + weight.name + " are one tensor in this program");
        break;
      }
    }
  }
  if (!problems.empty()) {
    std::string said = "load_state_dict: the weights do not fit the compiled program:";
    for (const std::string& problem : problems) said += "\n  " + problem;
    throw WeightMismatch(said + "\nNothing was changed.");
  }
}

}  // namespace torchgraft
