// What a package needs of the machine, and whether this one has it.
#include "graft/machine.h"

#include <link.h>
#include <sys/utsname.h>

#include <fstream>
#include <set>
#include <sstream>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "graft/cuda.h"

namespace torchgraft {
namespace {

[[noreturn]] void wrong(const std::string& needs, const std::string& has, const std::string& fix) {
  throw WrongMachine("it needs " + needs + ", here is " + has + ".\n" + fix);
}

std::set<std::string> cpu_sets() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

std::string release(const std::string& version) { return version.substr(0, version.find('+')); }

c10::Device cuda_device(const json& manifest, std::optional<c10::Device> wanted) {
  if (!at::hasCUDA())
    wrong("a CUDA device", "none", "Run it on a machine with a CUDA device, or compile and save it for 'cpu'.");
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Device place =
      wanted && wanted->has_index() ? *wanted : guard.getDevice();
  const json made = manifest.value("cuda", json());
  if (made != cuda_version())
    wrong("CUDA " + (made.is_string() ? text(made) : made.dump()), "CUDA " + cuda_version(),
          "Install the torch it was made with, or compile and save it again.");
  if (place.index() >= guard.deviceCount()) {
    std::string here;
    for (int i = 0; i < guard.deviceCount(); ++i) here += (i ? ", cuda:" : "cuda:") + std::to_string(i);
    wrong("device " + quote(place.str()), here, "Leave the device out, or choose one that is here.");
  }
  const auto shown = [](int64_t major, int64_t minor) {
    return std::to_string(major) + "." + std::to_string(minor);
  };
  const json& needs = list(object(manifest, "requires"), "capability");
  if (needs.size() != 2) bad("its compute capability is " + brief(needs));
  const auto [major, minor] = cuda_capability(place);
  if (major != integer(needs[0]) || minor != integer(needs[1]))
    wrong("compute capability " + shown(integer(needs[0]), integer(needs[1])),
          shown(major, minor) + " (" + cuda_name(place) + ")",
          "Compile and save it on a device of capability " + shown(major, minor) + ".");
  return place;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

}  // namespace

c10::Device check_machine(const json& manifest, std::optional<c10::Device> wanted) {
  const std::string& made = text(manifest, "torch");
  if (made != release(torch_version()))
    wrong("torch " + made, std::string("torch ") + torch_version(),
          "Install torch " + made + ", or compile and save it again with this one.");
  const json& needs = object(manifest, "requires");
  const std::string& kind = text(needs, "device");
  utsname about;
  uname(&about);
  if (text(needs, "machine") != about.machine)
    wrong("a " + text(needs, "machine") + " processor", about.machine,
          std::string("Compile and save it on a ") + about.machine + " machine.");
  const std::set<std::string> has = cpu_sets();
  std::vector<std::string> missing;
  for (const json& one : list(needs, "cpu"))
    if (!has.count(text(one))) missing.push_back(text(one));
  if (!missing.empty())
    wrong("a processor with " + joined(missing), "one without",
          "Compile and save it on a machine with this processor, or an older one.");
  c10::Device device(c10::kCPU);
  try {
    device = c10::Device(kind);
  } catch (const c10::Error&) {
    bad("there is no device " + quote(kind));
  }
  if (wanted && wanted->type() != device.type())
    wrong("device " + quote(kind), "device=" + quote(wanted->str()),
          "Leave the device out, or compile the model on that device and save that.");
  if (device.type() == c10::kCUDA) return cuda_device(manifest, wanted);
  if (device.type() == c10::kCPU) return device;
  if (!c10::impl::hasDeviceGuardImpl(device.type()))
    wrong("device " + quote(kind), "none of that kind", "Load the library that has it first.");
  return wanted && wanted->has_index() ? *wanted : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

void check_libraries(const json& manifest) {
  for (const json& entry : list(manifest, "libraries")) {
    std::vector<std::string> ops, missing;
    for (const json& op : list(entry, "ops")) {
      ops.push_back(text(op));
      const size_t dot = ops.back().find('.');
      const std::string base = ops.back().substr(0, dot);
      const std::string overload = dot == std::string::npos ? "" : ops.back().substr(dot + 1);
      if (!c10::Dispatcher::singleton().findSchema({base, overload})) missing.push_back(ops.back());
    }
    const bool named = entry.contains("name") && entry.at("name").is_string();
    const std::string name = named ? text(entry, "name") : "";
    if (!missing.empty())
      throw MissingLibrary(
          "it calls " + joined(missing) + ", which no loaded library registers.\n" +
          (named ? "Load it first: dlopen(\".../" + name + "\", RTLD_NOW)."
                 : "They were declared in Python; register them in a C++ library, and load that first."));
    const std::string path =
        named ? loaded([&](const std::string& file) { return file == name; }) : "";
    if (path.empty()) continue;
    std::ifstream file(path, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    if (sha256(content) != text(entry, "sha256"))
      throw MissingLibrary(
          "it calls " + joined(ops) + ", and the loaded " + name +
          " is not the one it was compiled with.\nLoad that one instead, or compile and save again.");
  }
}

std::string loaded(const std::function<bool(const std::string&)>& wanted) {
  struct Search { const std::function<bool(const std::string&)>& is; std::string found; } search{wanted, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        const std::string path = info->dlpi_name;
        if (search.is(path.substr(path.rfind('/') + 1))) search.found = path;
        return search.found.empty() ? 0 : 1;
      },
      &search);
  return search.found;
}

}  // namespace torchgraft
