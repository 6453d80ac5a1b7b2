#include "graft/action.h"

namespace torchgraft {

c10::IValue Frame::fill(const Value& value) const {
  if (value.kind == Value::kBuffer) return values[value.buffer];
  if (value.kind == Value::kLiteral) return value.literal;
  Values items;
  for (const Value& item : value.items) items.push_back(fill(item));
  if (value.kind == Value::kTuple) return c10::ivalue::Tuple::create(std::move(items));
  c10::impl::GenericList list(c10::AnyType::get());
  for (c10::IValue& item : items) list.push_back(std::move(item));
  return list;
}

void store(Frame& frame, const Step& step, c10::IValue result) {
  if (!step.unpack) {
    if (!step.outputs.empty() && step.outputs[0] >= 0) frame.values[step.outputs[0]] = std::move(result);
    return;
  }
  auto parts = parts_of(result);
  if (!parts) throw Error("a kernel gave one value where the plan has several");
  if (parts->size() < step.outputs.size())
    throw Error("a kernel gave " + std::to_string(parts->size()) + " values where the plan has " +
                std::to_string(step.outputs.size()));
  for (size_t i = 0; i < step.outputs.size(); ++i)
    if (step.outputs[i] >= 0) frame.values[step.outputs[i]] = std::move((*parts)[i]);
}

Values Region::call(Values values) const {
  std::vector<at::Tensor> inputs;
  inputs.reserve(values.size());
  for (c10::IValue& value : values) {
    if (!value.isTensor()) throw Error("generated code is given " + value.tagKind() + " for a tensor");
    inputs.push_back(std::move(value).toTensor());
  }
  std::vector<at::Tensor> made = call(inputs);
  return Values(std::make_move_iterator(made.begin()), std::make_move_iterator(made.end()));
}

}  // namespace torchgraft
