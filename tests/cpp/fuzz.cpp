// fuzz MODEL.graft COUNT SEED SIZE...: mutated packages are refused with a sentence, or run.
//
// Every second one is damaged as a file. The others are whole: a value in their JSON is another
// one, and the manifest says so; those without generated code are called, too, if they load.
#include <cstring>
#include <iostream>
#include <random>

#include <ATen/ATen.h>

#include "graft/archive.h"

using torchgraft::json;

namespace {

std::mt19937_64 random_bits;
size_t below(size_t end) { return end ? random_bits() % end : 0; }

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}


std::string zipped(const std::vector<std::pair<std::string, std::string>>& members) {
  std::string out, directory;
  for (const auto& [name, data] : members) {
    const auto at = static_cast<uint32_t>(out.size());
    const auto about = [&](std::string& to) {
      for (uint16_t one : {20, 0, 0, 0, 0}) put<uint16_t>(to, one);
      put<uint32_t>(to, 0);  // nobody reads the checksum: the manifest has better ones
      for (int i = 0; i < 2; ++i) put<uint32_t>(to, static_cast<uint32_t>(data.size()));
      put<uint16_t>(to, static_cast<uint16_t>(name.size()));
    };
    const size_t pad = -(at + 30 + name.size()) % 64;
    out += "PK\3\4";
    about(out);
    put<uint16_t>(out, static_cast<uint16_t>(pad));
    out += name + std::string(pad, '\0') + data;
    directory += "PK\1\2";
    put<uint16_t>(directory, 20);
    about(directory);
    put<uint16_t>(directory, 0);
    directory += std::string(6, '\0') + std::string(4, '\0');
    put<uint32_t>(directory, at);
    directory += name;
  }
  const auto at = static_cast<uint32_t>(out.size());
  out += directory + "PK\5\6" + std::string(4, '\0');
  for (int i = 0; i < 2; ++i) put<uint16_t>(out, static_cast<uint16_t>(members.size()));
  put<uint32_t>(out, static_cast<uint32_t>(directory.size()));
  put<uint32_t>(out, at);
  return out + std::string(2, '\0');
}

json other_value() {
  switch (below(10)) {
    case 0: return nullptr;
    case 1: return true;
    case 2: return static_cast<int64_t>(random_bits());
    case 3: return static_cast<int64_t>(below(8)) - 2;
    case 4: return 1e300;
    case 5: return "aten::relu";
    case 6: return json::array();
    case 7: return json::object();
    case 8: return {{"b", below(6)}};
    default: return {{"e", "FloorDiv"}, {"a", {1, 0}}};
  }
}

// Puts another value somewhere, or takes something away, or doubles it.
void mutate(json& data) {
  json* here = &data;
  while (here->is_structured() && !here->empty() && below(8) != 0) {
    const size_t at = below(here->size());
    here = &*std::next(here->begin(), static_cast<std::ptrdiff_t>(at));
  }
  if (here->is_structured() && !here->empty() && below(3) == 0)
    here->erase(std::next(here->begin(), static_cast<std::ptrdiff_t>(below(here->size()))));
  else if (here->is_array() && !here->empty() && below(3) == 0)
    here->push_back((*here)[below(here->size())]);
  else
    *here = other_value();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = argv[1];
  const int count = std::atoi(argv[2]);
  random_bits.seed(std::atoll(argv[3]));
  std::vector<int64_t> shape;
  for (int i = 4; i < argc; ++i) shape.push_back(std::atoll(argv[i]));
  const at::Tensor x = at::ones(shape);

  const torchgraft::Archive archive(path);
  std::string whole;
  {
    std::unique_ptr<FILE, int (*)(FILE*)> file(fopen(path.c_str(), "rb"), fclose);
    char part[65536];
    while (const size_t got = fread(part, 1, sizeof part, file.get())) whole.append(part, got);
  }
  bool code = false;
  for (const auto& [name, data] : archive.members) code = code || name.rfind("lib/", 0) == 0;

  long refused = 0, loaded = 0, ran = 0, odd = 0;
  for (int i = 0; i < count; ++i) {
    std::string bytes = whole;
    const bool damaged = i % 2 == 0;
    if (damaged) {
      if (below(4) == 0)
        bytes.resize(below(bytes.size()));
      else
        for (size_t k = 0; k <= below(4); ++k) {
          // Near the ends: the first headers and the directory decide what is read at all.
          const size_t near = std::min<size_t>(bytes.size(), 4096);
          const size_t at = below(3) == 0 ? below(bytes.size())
              : below(2) == 0             ? below(near)
                                          : bytes.size() - 1 - below(near);
          bytes[at] = static_cast<char>(random_bits());
        }
    } else {
      std::vector<std::pair<std::string, std::string>> members;
      json manifest = archive.manifest;
      for (const auto& [name, data] : archive.members) {
        if (name == "manifest.json") continue;
        std::string content(data);
        if (name == "program.json" && below(4) != 0) {
          json body = archive.read(name);
          for (size_t k = 0; k <= below(3); ++k) mutate(body);
          content = body.dump();
        }
        if (name == "weights.safetensors" && content.size() > 16 && below(4) == 0)
          content[below(std::min<size_t>(content.size(), 400))] = static_cast<char>(random_bits());
        manifest["members"][name] = {{"size", content.size()}, {"sha256", torchgraft::sha256(content)}};
        members.emplace_back(name, std::move(content));
      }
      if (below(4) == 0) mutate(manifest);
      members.insert(members.begin(), {"manifest.json", manifest.dump()});
      bytes = zipped(members);
    }
    try {
      const at::Tensor held =
          at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte);
      const auto program = torchgraft::load(held);
      if (!code) program.forward({x}), ++ran;
      ++loaded;
    } catch (const torchgraft::Error&) {
      ++refused;
    } catch (const c10::Error&) {
      ++refused;  // an operator refused its arguments
    } catch (const std::exception& error) {
      ++odd;
      std::cerr << "mutation " << i << ": " << typeid(error).name() << ": " << error.what() << "\n";
    }
  }
  std::cout << "{\"refused\": " << refused << ", \"loaded\": " << loaded << ", \"ran\": " << ran
            << ", \"odd\": " << odd << "}\n";
}
