#include "graft/gear.h"

namespace torchgraft {

Gear::Gear(const json& data, const Place& place, const std::vector<Part>& parts)
    : signature(data, place),
      program(index(field(data, "program", json::value_t::number_integer), parts.size())) {
  for (const json& name : list(data, "states")) states.push_back(text(name));
  const Plan& plan = parts[program].plan;
  const size_t tensors = signature.tensors.size();
  if (plan.inputs.size() != tensors + states.size() ||
      (is_known(signature.out_tree) && plan.outputs.size() != leaves_of(signature.out_tree)))
    bad("a plan takes or gives another number of values than its signature");
  for (const json& one : list(data, "static")) edge.fixed.insert(index(one, plan.inputs.size()));
  for (const json& one : list(data, "written")) edge.written.insert(index(one, plan.inputs.size()));
  for (const json& one : list(data, "views")) {
    if (!one.is_array() || one.size() != 3) bad("not a view: " + brief(one));
    const View view{static_cast<size_t>(index(one[0])), static_cast<size_t>(index(one[1])),
                    static_cast<size_t>(index(one[2], parts.size()))};
    if (view.output >= plan.outputs.size() || view.input >= tensors ||
        parts[view.program].plan.inputs.size() != tensors ||
        parts[view.program].plan.outputs.size() != 1)
      bad("a view is of an input, or is an output, that there is not");
    views.push_back(view);
  }
}

}  // namespace torchgraft
