// https://github.com/huggingface/safetensors: the length of a header (u64), the header (JSON, names
// to types, shapes and offsets), the elements of all tensors without gaps.
#include <c10/util/strides.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "stitch/base/printable.h"
#include "stitch/rref/files/file_tensors.h"

namespace stitch::files {

using nlohmann::json;

namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

constexpr const char* kMetadata = "__metadata__";
constexpr std::uint64_t kMaxHeader = 100'000'000;  // a limit of the format

// A tensor in a header.
struct Entry {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::string name;
  const ElementType* type = nullptr;
  std::vector<std::int64_t> sizes;
};

// Keys that stand twice are refused, as one reader takes the first and another one the last.
json parse_header(std::string_view text) {
  std::vector<std::set<std::string>> open;  // the keys of the objects that have begun
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > 4) refuse("its header is nested too deeply");
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      if (!open.back().insert(key).second)
        refuse("its header has \"" + base::printable(key) + "\" twice");
    }
    return true;
  };
  if (text.find('\0') != std::string_view::npos) refuse("its header has a NUL");
  if (!text.starts_with('{')) refuse("its header does not begin with '{'");
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::exception& error) {
    refuse("its header is not JSON: " + base::printable(error.what()));
  }
}

std::uint64_t number_in(const json& value, const std::string& of) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX)
    refuse(of + " is not a whole number from 0 to 2^63 - 1");
  return value.get<std::uint64_t>();
}

Entry parse_entry(const std::string& name, const json& value) {
  const std::string text = tensor_text(name);
  const auto field = [&](const char* key, json::value_t type) -> const json& {
    const auto found = value.is_object() ? value.find(key) : value.end();
    if (!value.is_object() || found == value.end() || found->type() != type)
      refuse(text + " has no \"" + key + "\", or one of another type");
    return *found;
  };
  Entry entry;
  entry.name = name;
  const auto& type = field("dtype", json::value_t::string).get_ref<const std::string&>();
  entry.type = find_type(&ElementType::safetensors, type);
  if (entry.type == nullptr)
    refuse(text + " has dtype \"" + base::printable(type) + "\", which this libtorch has not");
  for (const auto& size : field("shape", json::value_t::array))
    entry.sizes.push_back(static_cast<std::int64_t>(number_in(size, text + ": a size")));
  const json& offsets = field("data_offsets", json::value_t::array);
  if (offsets.size() != 2) refuse(text + " has not two offsets");
  entry.begin = number_in(offsets[0], text + ": an offset");
  entry.end = number_in(offsets[1], text + ": an offset");
  return entry;
}

}  // namespace

Tensors read_safetensors(const FileBytes& file) {
  std::uint64_t length = 0;
  if (file.bytes.size() < sizeof length) refuse("it is cut short: it has no length of a header");
  std::memcpy(&length, file.bytes.data(), sizeof length);
  if (length > kMaxHeader)
    refuse("it announces a header of " + std::to_string(length) + " bytes, at most " +
           std::to_string(kMaxHeader) + " are allowed");
  std::span<std::byte> rest = file.bytes.subspan(sizeof length);
  if (length > rest.size())
    refuse("it is cut short: its header takes " + std::to_string(length) + " bytes, it has " +
           std::to_string(rest.size()));
  const json header = parse_header({reinterpret_cast<const char*>(rest.data()), length});
  rest = rest.subspan(length);

  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadata) entries.push_back(parse_entry(name, value));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& one, const Entry& other) {
    return std::pair(one.begin, one.end) < std::pair(other.begin, other.end);
  });
  Tensors tensors;
  std::uint64_t at = 0;
  for (auto& entry : entries) {
    const std::string text = tensor_text(entry.name);
    if (entry.begin != at)
      refuse(text + " begins at byte " + std::to_string(entry.begin) + ", its place is " +
             std::to_string(at));
    if (entry.end < entry.begin || entry.end > rest.size())
      refuse(text + " ends at byte " + std::to_string(entry.end) + ", it begins at " +
             std::to_string(at) + " and the file has " + std::to_string(rest.size()));
    const std::uint64_t item = c10::elementSize(entry.type->type);
    const auto elements = count_elements(entry.sizes);
    if (!elements || *elements > INT64_MAX / item)
      refuse(text + " has more than 64 dimensions, or more elements than can be counted");
    if (*elements * item != entry.end - at)
      refuse(text + " has " + std::to_string(entry.end - at) + " bytes, its shape and " +
             entry.type->safetensors + " take " + std::to_string(*elements * item));
    const auto bytes = rest.subspan(at, entry.end - at);
    if (entry.type->type == at::kBool) expect_bools(bytes);
    tensors.emplace(std::move(entry.name),
                    view_of(storage_of(file, bytes, item), entry.type->type, 0, entry.sizes,
                            c10::contiguous_strides(entry.sizes)));
    at = entry.end;
  }
  if (at != rest.size())
    refuse("it has " + std::to_string(rest.size() - at) + " bytes behind its last tensor");
  return tensors;
}

std::string safetensors_header(const std::vector<TensorInfo>& tensors) {
  json header = json::object();
  header[kMetadata]["format"] = "pt";  // without it Python's transformers does not load a file
  std::uint64_t at = 0;
  for (const auto& [name, type, sizes] : tensors) {
    const ElementType* const known = find_type(&ElementType::torch, c10::toString(type));
    if (header.contains(name)) refuse(tensor_text(name) + " needs another name, or a .pt file");
    if (known == nullptr || known->safetensors == nullptr)
      refuse(tensor_text(name) + " has elements of type " + c10::toString(type) +
             ", which only .pt files have");
    const std::uint64_t end = at + count_elements(sizes).value_or(0) * c10::elementSize(type);
    header[name] = {{"dtype", known->safetensors}, {"shape", sizes}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  // So that the elements begin at a multiple of 64 bytes.
  text.resize((sizeof(std::uint64_t) + text.size() + 63) / 64 * 64 - sizeof(std::uint64_t), ' ');
  const std::uint64_t length = text.size();
  if (length > kMaxHeader)
    refuse("names and shapes take " + std::to_string(length) + " bytes, at most " +
           std::to_string(kMaxHeader) + " are allowed; a .pt file has no limit");
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

void write_safetensors(const Tensors& tensors, const Sink& out) {
  // Larger elements first: all are aligned then, as their beginning is.
  std::vector<const Tensors::value_type*> order;
  for (const auto& each : tensors) order.push_back(&each);
  std::stable_sort(order.begin(), order.end(), [](const auto* one, const auto* other) {
    return one->second.element_size() > other->second.element_size();
  });
  std::vector<TensorInfo> infos;
  for (const auto* each : order)
    infos.push_back({each->first, each->second.scalar_type(), each->second.sizes().vec()});
  const std::string header = safetensors_header(infos);
  out(header.data(), header.size());
  for (const auto* each : order) {
    const at::Tensor values = plain(each->second);
    out(values.data_ptr(), values.nbytes());
  }
}

}  // namespace stitch::files
