// The zip: stored members in a mapped file, each hashed in the manifest.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "torchgraft/torchgraft.h"

namespace torchgraft {

using nlohmann::json;

// The sentence of a package that cannot be loaded. The path is added where it is known.
[[noreturn]] void bad(const std::string& why);
std::string quote(std::string_view text);
std::string brief(const json& data);

// `data[name]`, which must be of a type; raises `BadPackage` where it is not.
const json& field(const json& data, const char* name, json::value_t kind);
const json& list(const json& data, const char* name);
const json& object(const json& data, const char* name);
const std::string& text(const json& data, const char* name);
const std::string& text(const json& data);
bool flag(const json& data, const char* name);
int64_t integer(const json& data);
int64_t index(const json& data, int64_t end = int64_t{1} << 31);
std::pair<const json*, const json*> pair(const json& data, const char* what);

std::string sha256(std::string_view data);

class Archive {
 public:
  explicit Archive(const std::string& path);
  explicit Archive(const at::Tensor& bytes);
  ~Archive();
  Archive(const Archive&) = delete;

  json read(const std::string& name) const;
  void verify(const std::optional<std::string>& whole) const;
  std::string_view member(const std::string& name) const;  // empty where there is none
  bool is_lent() const { return held_.defined(); }  // its bytes are the caller's, not to be written to

  std::map<std::string, std::string_view> members;
  json manifest;

 private:
  void open();
  std::string_view content_;
  at::Tensor held_;  // where it is no file
};

}  // namespace torchgraft
