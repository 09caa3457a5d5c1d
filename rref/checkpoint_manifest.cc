#include "stitch/rref/checkpoint_manifest.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "stitch/base/printable.h"
#include "stitch/rref/files/disk_file.h"

namespace stitch::rref {

using nlohmann::json;

namespace {

constexpr const char* kFormat = "stitch checkpoint";
constexpr int kVersion = 1;
constexpr const char* kNumber = "number";  // {"number": "inf"}: JSON has none of these

// Around the checksum of all that follows.
constexpr std::string_view kBefore = "{\"blake2b\": \"";
constexpr std::string_view kBehind = "\",";

std::string checksum_of(std::string_view text) {
  files::Checksum sum;
  sum.add(text.data(), text.size());
  return sum.text();
}

json to_json(double value) {
  if (std::isfinite(value)) return value;
  return {{kNumber, std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}
template <class T>
json to_json(const T& value) {
  return value;
}
json to_json(const std::vector<double>& values) {
  json list = json::array();
  for (const double each : values) list.push_back(to_json(each));
  return list;
}
json to_json(const CheckpointValues& values) {
  json object = json::object();
  for (const auto& [name, value] : values)
    object[name] = std::visit([](const auto& each) { return to_json(each); }, value);
  return object;
}

double double_in(const json& value) {
  return value.is_object() ? std::stod(value.at(kNumber).get<std::string>()) : value.get<double>();
}
CheckpointValue value_in(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return double_in(value);
  std::vector<double> list;
  for (const json& each : value) list.push_back(double_in(each));
  return list;
}
CheckpointValues values_in(const json& object) {
  CheckpointValues values;
  for (const auto& [name, value] : object.get_ref<const json::object_t&>())
    values.emplace(name, value_in(value));
  return values;
}

json to_json(const Manifest::File& file) {
  json parameters = json::object();
  for (const auto& each : file.parameters) {
    json& parameter = parameters[each.name];
    parameter = {{"dtype", each.dtype}, {"shape", each.sizes}, {"tensors", json::array()}};
    for (const auto& tensor : each.tensors) parameter["tensors"].push_back(tensor.field);
  }
  return {{"owner", file.owner},
          {"file", file.file},
          {"bytes", file.bytes},
          {"blake2b", file.checksum},
          {"parameters", parameters}};
}
Manifest::File file_in(const json& object) {
  Manifest::File file;
  object.at("owner").get_to(file.owner);
  object.at("file").get_to(file.file);
  object.at("bytes").get_to(file.bytes);
  object.at("blake2b").get_to(file.checksum);
  for (const auto& [name, each] : object.at("parameters").get_ref<const json::object_t&>()) {
    StoredParameter parameter{name,
                              each.at("dtype").get<std::string>(),
                              each.at("shape").get<std::vector<std::int64_t>>(),
                              {}};
    for (const json& field : each.at("tensors"))
      parameter.tensors.push_back({field.get<std::string>(), {}, {}});
    file.parameters.push_back(std::move(parameter));
  }
  return file;
}

}  // namespace

std::string write_manifest(const Manifest& manifest) {
  json parts = json::object();
  for (const auto& [name, part] : manifest.parts) {
    json& object = parts[name];
    object = {{"type", part.type}, {"options", to_json(part.options)}, {"files", json::array()}};
    for (const auto& file : part.files) object["files"].push_back(to_json(file));
  }
  const json all{{"format", kFormat},
                 {"version", kVersion},
                 {"values", to_json(manifest.values)},
                 {"parts", std::move(parts)}};
  try {
    const std::string rest = all.dump(1).substr(1) + '\n';
    return std::string(kBefore) + checksum_of(rest) + std::string(kBehind) + rest;
  } catch (const json::exception& error) {
    files::refuse(std::string("a name or a value is not UTF-8: ") + base::printable(error.what()));
  }
}

Manifest read_manifest(std::string_view text) {
  const std::size_t length = checksum_of("").size();
  const std::size_t begin = kBefore.size() + length + kBehind.size();
  if (text.size() < begin || !text.starts_with(kBefore) ||
      text.substr(kBefore.size() + length, kBehind.size()) != kBehind)
    files::refuse("it is not the manifest of a checkpoint");
  if (text.substr(kBefore.size(), length) != checksum_of(text.substr(begin)))
    files::refuse("it is damaged: its checksum is another one");
  return parse_manifest(text);
}

Manifest parse_manifest(std::string_view text) {
  try {
    const json all = json::parse(text.begin(), text.end());
    if (all.at("format") != kFormat || all.at("version") != kVersion)
      files::refuse(std::string("it is not of format \"") + kFormat + "\", version " +
                    std::to_string(kVersion));
    Manifest manifest;
    manifest.values = values_in(all.at("values"));
    for (const auto& [name, object] : all.at("parts").get_ref<const json::object_t&>()) {
      auto& part = manifest.parts[name];
      object.at("type").get_to(part.type);
      part.options = values_in(object.at("options"));
      for (const json& file : object.at("files")) part.files.push_back(file_in(file));
    }
    return manifest;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // of the JSON reader, or of a number's text
    files::refuse("it is damaged: " + base::printable(error.what()));
  }
}

}  // namespace stitch::rref
