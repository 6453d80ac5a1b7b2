// What a package needs of the machine, and whether this one has it.
#pragma once

#include <functional>

#include "graft/archive.h"

namespace torchgraft {

// The device that it will run on; raises `WrongMachine` where there is none.
c10::Device check_machine(const json& manifest, std::optional<c10::Device> wanted);
// Raises `MissingLibrary` unless every operator is here, and from the same library.
void check_libraries(const json& manifest);
// The path of a library in this process whose file has the wanted name; empty where there is none.
std::string loaded(const std::function<bool(const std::string&)>& wanted);

}  // namespace torchgraft
