#include "graft/archive.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include <ATen/core/Tensor.h>
#include <regex>
#include <set>

namespace torchgraft {
namespace {

constexpr const char* kManifest = "manifest.json";
constexpr int64_t kVersion = 2;
constexpr size_t kMostMembers = 4096;
constexpr size_t kMostJson = size_t{256} << 20;
constexpr int kDeepestJson = 200;

template <typename T>
T little(std::string_view data, size_t at) {
  if (at > data.size() || data.size() - at < sizeof(T)) bad("its directory is damaged (cut off)");
  T value;
  std::memcpy(&value, data.data() + at, sizeof(T));  // this runs on little-endian machines
  return value;
}

bool is_name(std::string_view name) {
  int parts = 0;
  while (true) {
    const size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part.size() > 128 || part == "." || part == ".." || ++parts > 4) return false;
    for (char c : part)
      if (!(isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-')) return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

}  // namespace

void bad(const std::string& why) { throw BadPackage(why); }

std::string quote(std::string_view text) {
  std::string made = "'";
  for (unsigned char c : text.substr(0, 200)) {
    if (c < 32 || c == 127) {
      char hex[8];
      snprintf(hex, sizeof hex, "\\x%02x", c);
      made += hex;
    } else {
      made += static_cast<char>(c);
    }
  }
  return made + "'";
}

std::string brief(const json& data) {
  return data.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 80);
}

const json& field(const json& data, const char* name, json::value_t kind) {
  if (!data.is_object() || !data.contains(name))
    bad("'" + std::string(name) + "' is missing in " + brief(data));
  const json& found = data.at(name);
  const bool whole = kind == json::value_t::number_integer && found.is_number_integer();
  if (found.type() != kind && !whole)
    bad("'" + std::string(name) + "' is of another type: " + brief(found));
  return found;
}

const json& list(const json& data, const char* name) { return field(data, name, json::value_t::array); }
const json& object(const json& data, const char* name) { return field(data, name, json::value_t::object); }
bool flag(const json& data, const char* name) { return field(data, name, json::value_t::boolean); }

const std::string& text(const json& data, const char* name) {
  return field(data, name, json::value_t::string).get_ref<const std::string&>();
}

const std::string& text(const json& data) {
  if (!data.is_string()) bad("not a text: " + brief(data));
  return data.get_ref<const std::string&>();
}

int64_t integer(const json& data) {
  if (!data.is_number_integer() ||
      (data.is_number_unsigned() && data.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)))
    bad("not an integer of 64 bits: " + brief(data));
  return data.get<int64_t>();
}

int64_t index(const json& data, int64_t end) {
  const int64_t found = integer(data);
  if (found < 0 || found >= end)
    bad(brief(data) + " is out of range, there are " + std::to_string(end));
  return found;
}

std::pair<const json*, const json*> pair(const json& data, const char* what) {
  if (!data.is_array() || data.size() != 2) bad("'" + std::string(what) + "' must be a list of pairs");
  return {&data[0], &data[1]};
}

Archive::Archive(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) bad(std::string("it cannot be read (") + strerror(errno) + ")");
  struct stat about;
  if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode)) {
    ::close(file);
    bad("it is not a file");
  }
  if (about.st_size == 0) {
    ::close(file);
    bad("it is empty");
  }
  // Copy on write: a program may write to its buffers, the file stays as it is.
  void* data = mmap(nullptr, about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  ::close(file);
  if (data == MAP_FAILED) bad(std::string("it cannot be mapped (") + strerror(errno) + ")");
  content_ = {static_cast<const char*>(data), static_cast<size_t>(about.st_size)};
  try {
    open();
  } catch (...) {
    munmap(data, content_.size());
    throw;
  }
}

Archive::Archive(const at::Tensor& bytes) : held_(bytes) {
  if (!bytes.defined() || bytes.scalar_type() != at::kByte || bytes.dim() != 1 || !bytes.is_contiguous() ||
      !bytes.device().is_cpu())
    bad("it is no row of bytes");
  content_ = {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
  open();
}

Archive::~Archive() {
  if (!held_.defined()) munmap(const_cast<char*>(content_.data()), content_.size());
}

void Archive::open() {
  constexpr size_t kEnd = 22;  // the end record, with no comment behind it
  const size_t end = content_.size() < kEnd ? 0 : content_.size() - kEnd;
  if (content_.size() < kEnd || content_.substr(end, 4) != std::string_view("PK\5\6", 4))
    bad("it is not a zip archive, or is cut off, or something was put behind it");
  uint64_t count = little<uint16_t>(content_, end + 10);
  uint64_t size = little<uint32_t>(content_, end + 12), at = little<uint32_t>(content_, end + 16);
  if (end >= 20 && content_.substr(end - 20, 4) == std::string_view("PK\6\7", 4)) {  // zip64
    const uint64_t record = little<uint64_t>(content_, end - 20 + 8);
    if (record > content_.size() || content_.substr(record, 4) != std::string_view("PK\6\6", 4))
      bad("its directory is damaged");
    count = little<uint64_t>(content_, record + 32);
    size = little<uint64_t>(content_, record + 40);
    at = little<uint64_t>(content_, record + 48);
  }
  if (at > end || size > end - at) bad("its directory is damaged");
  if (count > kMostMembers)
    bad("it has " + std::to_string(count) + " members, " + std::to_string(kMostMembers) + " are allowed");

  struct Info { std::string_view name; uint64_t at, size; };
  std::vector<Info> infos;
  for (uint64_t i = 0; i < count; ++i) {
    if (content_.substr(at, 4) != std::string_view("PK\1\2", 4)) bad("its directory is damaged");
    const auto flags = little<uint16_t>(content_, at + 8), method = little<uint16_t>(content_, at + 10);
    uint64_t packed = little<uint32_t>(content_, at + 20), full = little<uint32_t>(content_, at + 24);
    uint64_t header = little<uint32_t>(content_, at + 42);
    const size_t name_length = little<uint16_t>(content_, at + 28);
    const size_t extra_length = little<uint16_t>(content_, at + 30);
    const size_t comment_length = little<uint16_t>(content_, at + 32);
    if (at + 46 + name_length + extra_length + comment_length > end) bad("its directory is damaged");
    const std::string_view name = content_.substr(at + 46, name_length);
    std::string_view extra = content_.substr(at + 46 + name_length, extra_length);
    while (extra.size() >= 4) {
      const auto id = little<uint16_t>(extra, 0), length = little<uint16_t>(extra, 2);
      if (static_cast<size_t>(length) + 4 > extra.size()) bad("its directory is damaged");
      if (id == 1) {  // sizes of 64 bits, each where the field above is full
        const std::string_view wide = extra.substr(4, length);
        size_t next = 0;
        for (uint64_t* value : {&full, &packed, &header}) {
          if (*value == 0xFFFFFFFF) {
            *value = little<uint64_t>(wide, next);
            next += 8;
          }
        }
      }
      extra.remove_prefix(4 + length);
    }
    if (!is_name(name)) bad("a member is named " + quote(name) + ", which is no such name");
    if (method != 0 || (flags & ~0x0808) != 0)
      bad(quote(name) + " is compressed or encrypted; members must be stored");
    if (packed != full) bad(quote(name) + " has two sizes");
    infos.push_back({name, header, full});
    at += 46 + name_length + extra_length + comment_length;
  }
  if (infos.empty() || infos[0].name != kManifest) bad("its first member is not manifest.json");
  std::stable_sort(infos.begin(), infos.end(), [](auto& a, auto& b) { return a.at < b.at; });
  uint64_t last = 0;
  for (const Info& info : infos) {
    if (members.count(std::string(info.name))) bad("there are two members " + quote(info.name));
    if (info.at < last || info.at > content_.size() || content_.size() - info.at < 30)
      bad(quote(info.name) + " overlaps another member");
    const size_t name_length = little<uint16_t>(content_, info.at + 26);
    const size_t extra_length = little<uint16_t>(content_, info.at + 28);
    if (content_.substr(info.at, 4) != std::string_view("PK\3\4", 4) ||
        content_.substr(info.at + 30, name_length) != info.name)
      bad(quote(info.name) + " is not where the directory says");
    const uint64_t start = info.at + 30 + name_length + extra_length;
    if (start > content_.size() || info.size > content_.size() - start)
      bad(quote(info.name) + " is cut off");
    members.emplace(info.name, content_.substr(start, info.size));
    last = start + info.size;
  }

  manifest = read(kManifest);
  if (text(manifest, "format") != "torchgraft") bad("it is not torchgraft's");
  const int64_t version = integer(field(manifest, "version", json::value_t::number_integer));
  if (version != kVersion)
    bad("its format has version " + std::to_string(version) + ", this torchgraft reads " +
        std::to_string(kVersion));
  const json& listed = object(manifest, "members");
  for (const auto& [name, view] : members)
    if (name != kManifest && !listed.contains(name)) bad("the manifest and the members differ in " + name);
  for (const auto& [name, entry] : listed.items()) {
    if (!members.count(name)) bad("the manifest and the members differ in " + quote(name));
    text(entry, "sha256");
    const int64_t size = index(field(entry, "size", json::value_t::number_integer), INT64_MAX);
    if (static_cast<size_t>(size) != members.at(name).size())
      bad(quote(name) + " has " + std::to_string(members.at(name).size()) + " bytes, " +
          std::to_string(size) + " were written");
  }
}

std::string_view Archive::member(const std::string& name) const {
  const auto found = members.find(name);
  return found == members.end() ? std::string_view() : found->second;
}

json Archive::read(const std::string& name) const {
  const std::string_view data = member(name);
  if (data.size() > kMostJson)
    bad(quote(name) + " has " + std::to_string(data.size()) + " bytes, " + std::to_string(kMostJson) +
        " are allowed");
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kDeepestJson) bad(quote(name) + " is nested too deeply");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      bad(quote(name) + " is not JSON (a key occurs twice)");
    return true;
  };
  try {
    return json::parse(data.begin(), data.end(), watch);
  } catch (const json::exception& error) {
    bad(quote(name) + " is not JSON (" + error.what() + ")");
  }
}

void Archive::verify(const std::optional<std::string>& whole) const {
  if (whole) {
    std::string wanted = *whole;
    for (char& c : wanted) c = static_cast<char>(tolower(static_cast<unsigned char>(c)));
    const std::string found = sha256(content_);
    if (found != wanted) bad("its SHA-256 is " + found + ", not " + *whole);
  }
  for (const auto& [name, entry] : manifest.at("members").items())
    if (sha256(members.at(name)) != text(entry, "sha256"))
      bad(quote(name) + " was altered after it was written");
}

}  // namespace torchgraft
