// `torchgraft::load`, and the call of a program.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <shared_mutex>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "graft/action.h"
#include "graft/capture.h"
#include "graft/folder.h"
#include "graft/gear.h"
#include "graft/link.h"
#include "graft/machine.h"
#include "graft/pages.h"
#include "graft/weights.h"

namespace torchgraft {
namespace {

const std::set<std::string> kModes = {"eager", "default", "reduce-overhead", "max-autotune"};

// Gradients, autocast and inference mode of the caller do not reach the program.
struct Quiet {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

at::Tensor restrided(const at::Tensor& leaf, const TensorSpec& spec) {
  at::Tensor plain = leaf.requires_grad() ? leaf.detach() : leaf;
  if (spec.layout != at::kStrided) return plain;
  if (plain.is_conj()) plain = plain.resolve_conj();
  if (plain.is_neg()) plain = plain.resolve_neg();
  if (!spec.stride) return plain.contiguous(spec.format);
  if (plain.strides() == *spec.stride) return plain;
  return at::empty_strided(plain.sizes(), *spec.stride, plain.options()).copy_(plain);
}

}  // namespace

struct Program::Body {
  Body(std::shared_ptr<Archive> archive, c10::Device device)
      : archive(std::move(archive)), place{device} {
    const json body = this->archive->read("program.json");
    name = text(body, "name");
    mode = text(body, "mode");
    if (!kModes.count(mode)) bad("its mode is " + quote(mode));
    for (const json& entry : list(body, "weights")) weights.emplace_back(entry);
    const auto tensors = read_tensors(this->archive->member("weights.safetensors"), this->archive);
    std::map<std::string, at::Tensor> states;  // two names of one tensor are one
    for (const Weight& weight : weights) {
      const auto found = tensors.find(weight.tensor);
      if (found == tensors.end() || found->second.scalar_type() != weight.dtype ||
          found->second.sizes() != weight.shape)
        bad("weight " + quote(weight.name) + " is not among the tensors, or another one");
      at::Tensor& held = stored[weight.name] = found->second;
      if (weight.kind != "state") continue;
      at::Tensor& state = states[weight.place()];
      if (!state.defined()) {
        state = weight.like(held, place);
        if (this->archive->is_lent() && state.is_alias_of(held)) state = state.clone();
      }
      held = state;
    }
    unpack();
    prepare = parse_part(object(body, "prepare"), 0, 0, place, libraries);
    if (prepare.plan.inputs.size() != weights.size())
      bad("the plan of the weights takes another number of them");
    const size_t values = prepare.plan.outputs.size();
    for (const json& entry : list(body, "programs")) {
      const size_t number = parts.size();
      parts.push_back(parse_part(entry, number, values, place, libraries));
    }
    for (const json& entry : list(body, "gears")) {
      gears.push_back(std::make_unique<Gear>(entry, place, parts));
      gears.back()->edge.alias_outputs = flag(body, "alias_outputs");
      for (const std::string& state : gears.back()->states)
        if (!is_state(state)) bad("there is no state " + quote(state));
    }
    if (gears.empty()) bad("it has no program");
  }

  bool is_state(const std::string& name) const {
    for (const Weight& weight : weights)
      if (weight.name == name && weight.kind == "state") return true;
    return false;
  }

  void unpack() {
    for (const auto& [member, data] : archive->members) {
      if (member.rfind("lib/", 0) != 0) continue;
      const std::string file = member.substr(4);
      const size_t dot = file.rfind('.');
      const std::string kind = dot == std::string::npos ? "" : file.substr(dot + 1);
      if ((kind != "so" && kind != "json") || file.find('/') != std::string::npos)
        bad(quote(member) + " is neither a library nor what belongs to one");
      const std::string place = folder.path + "/" + file.substr(0, dot);
      std::filesystem::create_directories(place);
      libraries[member] = place + "/region." + kind;
      std::ofstream out(libraries[member], std::ios::binary);
      out.write(data.data(), static_cast<std::streamsize>(data.size()));
      if (!out) throw Error("cannot write " + libraries[member] + "; set TMPDIR to a folder with room");
    }
  }

  // Link everything with these weights; nothing changes where that fails.
  void start(const Weights& given) {
    Quiet quiet;
    Values inputs;
    std::map<std::string, at::Tensor> placed;  // two names of one tensor are one
    for (const Weight& weight : weights) {
      if (const auto found = given.find(weight.name); found != given.end()) {
        inputs.emplace_back(found->second);
      } else if (weight.kind == "state") {
        inputs.emplace_back(stored.at(weight.name));
      } else {
        at::Tensor& held = placed[weight.place()];
        if (!held.defined()) held = weight.like(stored.at(weight.name), place);
        inputs.emplace_back(held);
      }
    }
    const auto memory = [](const c10::IValue& value) -> const void* {
      const bool strided = value.isTensor() && value.toTensor().layout() == at::kStrided;
      return strided ? value.toTensor().storage().data() : nullptr;
    };
    std::set<const void*> kept;
    for (const auto& input : inputs) kept.insert(memory(input));
    Values values = link(prepare, {}, {}, place.device)->run(std::move(inputs));
    Pages pages;
    for (auto& value : values)
      if (memory(value) && !kept.count(memory(value))) value = pages.settle(value.toTensor());
    auto linked = std::make_shared<std::vector<std::shared_ptr<Linked>>>();
    for (const Part& part : parts) linked->push_back(link(part, values, *linked, place.device));
    for (const auto& gear : gears) linked->push_back(entrance(*gear, linked->at(gear->program)));
    if (place.device.type() != c10::kCPU)  // calls may come on other streams than this one
      c10::impl::VirtualGuardImpl(place.device.type()).synchronizeDevice(place.device.index());
    std::unique_lock<std::shared_mutex> hold(lock);
    programs = std::move(linked);
  }

  // What a call of a gear runs: its program, or that as a CUDA graph where its mode asks for it.
  std::shared_ptr<Linked> entrance(const Gear& gear, const std::shared_ptr<Linked>& program) {
    const bool wanted = mode == "reduce-overhead" || mode == "max-autotune";
    if (!wanted || place.device.type() != c10::kCUDA) return program;
    const auto refused = [this](const std::string& why) {
      std::lock_guard<std::mutex> hold(noted);
      notes.insert("not captured as a CUDA graph: " + why);
    };
    for (const auto& [name, kernel] : parts[gear.program].kernels)
      if (kernel.name.rfind("_c10d_functional::", 0) == 0) {
        refused("its collectives are not captured in C++");
        return program;
      }
    return captured(program, place.device, gear.edge, refused);
  }

  // A call; it gives tensors or values. Generated code alone takes and gives tensors as they are.
  template <typename Outputs>
  Outputs run(const std::vector<at::Tensor>& given) const {
    const size_t number = fitting(given);
    const Gear& gear = *gears[number];
    const auto& specs = gear.signature.tensors;
    if (at::GradMode::is_enabled())
      for (size_t i = 0; i < given.size(); ++i)
        if (specs[i]->mutated && given[i].requires_grad() && given[i].is_leaf())
          throw InputMismatch(
              Misfit{specs[i]->name, "a tensor that the program may write to",
                     "a leaf that requires grad",
                     "Call it under torch.no_grad(), or pass " + specs[i]->name + ".detach()."}
                  .text());
    Quiet quiet;
    std::vector<at::Tensor> inputs;
    inputs.reserve(given.size() + gear.states.size());
    std::vector<std::pair<size_t, at::Tensor>> copied;  // inputs that the program has a copy of
    for (size_t i = 0; i < given.size(); ++i) {
      at::Tensor fitted = restrided(given[i], *specs[i]);
      if (specs[i]->layout == at::kStrided && !fitted.is_alias_of(given[i])) copied.emplace_back(i, fitted);
      inputs.emplace_back(std::move(fitted));
    }
    std::shared_ptr<const std::vector<std::shared_ptr<Linked>>> linked;
    {
      std::shared_lock<std::shared_mutex> hold(lock);
      linked = programs;
      for (const std::string& state : gear.states) inputs.emplace_back(stored.at(state));
    }
    Outputs outputs = called<Outputs>(*(*linked)[parts.size() + number], std::move(inputs));
    for (const auto& [i, used] : copied) {
      if (specs[i]->mutated) given[i].detach().copy_(used);
      for (const View& view : gear.views)  // of what the caller has, not of its copy
        if (view.input == i) outputs[view.output] = viewed(*(*linked)[view.program], given);
    }
    return outputs;
  }

  template <typename Outputs>
  static Outputs called(Linked& program, std::vector<at::Tensor> inputs) {
    if (const Region* region = program.region()) {
      std::vector<at::Tensor> made = region->call(inputs);
      if constexpr (std::is_same_v<Outputs, Values>)
        return Values(std::make_move_iterator(made.begin()), std::make_move_iterator(made.end()));
      else
        return made;
    }
    Values made = program.run(
        Values(std::make_move_iterator(inputs.begin()), std::make_move_iterator(inputs.end())));
    if constexpr (std::is_same_v<Outputs, Values>) {
      return made;
    } else {
      std::vector<at::Tensor> tensors;
      tensors.reserve(made.size());
      for (c10::IValue& value : made) {
        if (value.isTensor())
          tensors.push_back(std::move(value).toTensor());
        else if (value.isNone())
          tensors.emplace_back();
        else
          tensors.push_back(at::scalar_tensor(value.toScalar()));
      }
      return tensors;
    }
  }

  static at::Tensor viewed(Linked& program, const std::vector<at::Tensor>& given) {
    Values inputs;
    for (const at::Tensor& one : given) inputs.emplace_back(one.detach());
    return program.run(std::move(inputs)).at(0).toTensor();
  }

  // The place of the gear that takes these.
  size_t fitting(const std::vector<at::Tensor>& given) const {
    const size_t wanted = gears[0]->signature.tensors.size();
    if (given.size() != wanted)
      throw InputMismatch(Misfit{
          "arguments", std::to_string(wanted) + " tensors (" + gears[0]->signature.show() + ")",
          std::to_string(given.size()), "Pass the tensors that were declared, in order."}.text());
    std::optional<Misfit> why;
    for (size_t i = 0; i < gears.size(); ++i) {
      if (gears[i]->signature.tensors.size() != wanted) continue;
      why = gears[i]->signature.misfit(given);
      if (!why) return i;
    }
    if (gears.size() == 1 || !why->is_size) throw InputMismatch(why->text());
    std::string shapes;
    for (const auto& gear : gears) shapes += (shapes.empty() ? "" : "; ") + gear->signature.show();
    why->declared = "one of the gears (" + shapes + ")";
    why->fix = "Add that shape to gears=[...] of its graft.Input, or pad it to one of them.";
    throw InputMismatch(why->text());
  }

  std::shared_ptr<Archive> archive;
  Place place;
  Folder folder;  // that libraries are unpacked to; it goes with the program
  std::string name, mode;
  std::vector<Weight> weights;
  std::map<std::string, at::Tensor> stored;
  std::map<std::string, std::string> libraries;
  Part prepare;
  std::vector<Part> parts;
  std::vector<std::unique_ptr<Gear>> gears;
  mutable std::mutex noted;
  std::set<std::string> notes;
  mutable std::shared_mutex lock;
  // The parts, then what a call of each gear runs.
  std::shared_ptr<const std::vector<std::shared_ptr<Linked>>> programs;
};

Program::Body& Program::body() const {
  if (!body_) throw Error("this Program is empty.\nAssign one to it: program = torchgraft::load(path);");
  return *body_;
}

std::vector<at::Tensor> Program::forward(const std::vector<at::Tensor>& inputs) const {
  return body().run<std::vector<at::Tensor>>(inputs);
}

c10::IValue Program::operator()(
    const std::vector<c10::IValue>& args,
    const std::unordered_map<std::string, c10::IValue>& kwargs) const {
  const Signature& signature = body().gears[0]->signature;
  c10::impl::GenericDict named(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, value] : kwargs) named.insert(name, value);
  const Values leaves = signature.leaves(c10::ivalue::Tuple::create(args), named);
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < leaves.size() && i < signature.specs.size(); ++i) {
    const Spec& spec = signature.specs[i];
    if (!spec.tensor) {
      if (!same(spec.constant.literal, leaves[i]))
        throw InputMismatch(Misfit{
            spec.name, "the constant " + Plan().show(spec.constant), show(leaves[i]),
            "The program was compiled for that value; compile again for another one."}.text());
    } else if (!leaves[i].isTensor()) {
      throw InputMismatch(Misfit{
          spec.name, signature.show(*spec.tensor), kind_of(leaves[i]) + " " + show(leaves[i]),
          "Pass a tensor."}.text());
    } else {
      tensors.push_back(leaves[i].toTensor());
    }
  }
  Values outputs = body().run<Values>(tensors);
  size_t next = 0;
  return unflatten(signature.out_tree, outputs, next);
}

const std::string& Program::name() const { return body().name; }

c10::Device Program::device() const { return body().place.device; }

std::vector<std::string> Program::inputs() const {
  std::vector<std::string> names;
  for (const TensorSpec* spec : body().gears[0]->signature.tensors) names.push_back(spec->name);
  return names;
}

std::string Program::signature() const {
  std::string text;
  for (const auto& gear : body().gears) text += (text.empty() ? "" : "\n") + gear->signature.show();
  return text;
}

std::vector<std::string> Program::notes() const {
  std::lock_guard<std::mutex> hold(body().noted);
  return {body().notes.begin(), body().notes.end()};
}

void Program::load_state_dict(const Weights& given) {
  check_weights(body().weights, given);
  Weights moved;
  at::NoGradGuard none;
  for (const Weight& weight : body().weights) {
    if (!weight.saved) continue;
    at::Tensor& held = moved[weight.name] = weight.like(given.at(weight.name), body().place);
    if (!held.is_alias_of(given.at(weight.name))) continue;
    const at::Tensor copy = held.clone();  // the caller may write to what it gave
    if (copy.strides() == held.strides()) held = copy;  // no elements that overlap
  }
  for (const Weight& weight : body().weights)
    if (weight.kind == "state" && moved.count(weight.name)) {
      body().stored.at(weight.name).copy_(moved.at(weight.name));
      moved.erase(weight.name);
    }
  body().start(moved);
  std::unique_lock<std::shared_mutex> hold(body().lock);
  for (auto& [name, tensor] : moved) body().stored[name] = tensor;
}

const char* torch_version() { return GRAFT_TORCH; }

// Opens an archive and makes a program of it; what goes wrong names where it came from.
struct Loader {
  template <typename Source>
  static Program load(const Source& source, const std::string& path, const Options& options);
};

template <typename Source>
Program Loader::load(const Source& source, const std::string& path, const Options& options) {
  const std::string again =
      "Copy it again from where it was saved, or save it again with compiled.save(path).";
  const auto whole = [&](const std::string& why) {
    return BadPackage(path + ": not a package that can be loaded: " + why + ".\n" + again);
  };
  try {
    auto archive = std::make_shared<Archive>(source);
    const c10::Device device = check_machine(archive->manifest, options.device);
    archive->verify(options.sha256);
    check_libraries(archive->manifest);
    Program program;
    program.body_ = std::make_shared<Program::Body>(std::move(archive), device);
    if (options.weights)
      program.load_state_dict(*options.weights);
    else
      program.body_->start({});
    return program;
  } catch (const WrongMachine& error) {
    throw WrongMachine(path + ": " + error.what());
  } catch (const MissingLibrary& error) {
    throw MissingLibrary(path + ": " + error.what());
  } catch (const BadPackage& error) {
    throw whole(error.what());
  } catch (const BadPlan& error) {
    throw whole(error.what());
  } catch (const UnorderedUse& error) {
    throw whole(error.what());
  } catch (const c10::Error& error) {  // an operator of the plan of the weights refused them
    throw whole(error.what_without_backtrace());
  } catch (const json::exception& error) {
    throw whole(error.what());
  } catch (const std::out_of_range& error) {
    throw whole(error.what());
  } catch (const std::bad_alloc&) {
    throw whole("it asks for more memory than there is");
  }
}

Program load(const std::string& path, const Options& options) {
  return Loader::load(path, path, options);
}

Program load(const at::Tensor& bytes, const Options& options) {
  return Loader::load(bytes, "<bytes>", options);
}

}  // namespace torchgraft
