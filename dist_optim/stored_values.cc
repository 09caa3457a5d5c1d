#include "stitch/dist_optim/stored_values.h"

#include <ATen/ATen.h>

#include <charconv>

#include "stitch/base/error.h"
#include "stitch/rref/files/file_tensors.h"

namespace stitch::optim {

namespace {

constexpr std::string_view kIndices = ".indices";
constexpr std::string_view kValues = ".values";
constexpr std::string_view kSizes = ".sizes";

// The name without its ending; empty where it has another one.
std::string without(std::string_view ending, const std::string& name) {
  return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : std::string();
}

}  // namespace

CheckpointValues join_groups(const std::vector<NamedValues>& groups) {
  CheckpointValues values;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [option, value] : groups[i]) {
      const std::string name = std::to_string(i) + '.' + option;
      std::visit(
          [&](const auto& each) {
            if constexpr (std::is_constructible_v<CheckpointValue, decltype(each)>) {
              values.emplace(name, each);
            } else {
              files::refuse("option " + name + " is a tensor");
            }
          },
          value);
    }
  }
  return values;
}

std::vector<NamedValues> split_groups(const CheckpointValues& values, std::size_t groups) {
  std::vector<NamedValues> all(groups);
  for (const auto& [name, value] : values) {
    if (name == kStepName) continue;
    std::size_t group = 0;
    const char* const end = name.data() + name.size();
    const auto [dot, error] = std::from_chars(name.data(), end, group);
    if (error != std::errc() || dot == end || *dot != '.' || group >= groups)
      files::refuse("options have \"" + name +
                    "\"; this optimizer has parameter groups: " + std::to_string(groups));
    NamedValues& of = all[group];
    const std::string option(dot + 1, end);
    std::visit([&](const auto& each) { of.emplace(option, each); }, value);
  }
  return all;
}

std::int64_t next_step_in(const CheckpointValues& values) {
  const auto found = values.find(kStepName);
  const auto* const step =
      found == values.end() ? nullptr : std::get_if<std::int64_t>(&found->second);
  if (step == nullptr || *step < 0) files::refuse("options have no number of the next step");
  return *step;
}

rref::StoredObject::Fields to_fields(const NamedValues& state) {
  rref::StoredObject::Fields fields;
  for (const auto& [name, value] : state) {
    at::Tensor tensor = tensor_of(value);
    if (tensor.is_sparse()) {
      fields[name + std::string(kIndices)] = tensor._indices();
      fields[name + std::string(kValues)] = tensor._values();
      fields[name + std::string(kSizes)] = at::tensor(tensor.sizes());
    } else {
      fields[name] = std::move(tensor);
    }
  }
  return fields;
}

NamedValues from_fields(const rref::StoredObject::Fields& fields, const at::Tensor& parameter) {
  NamedValues values;
  for (const auto& [name, tensor] : fields) {
    if (const auto of = without(kIndices, name); !of.empty()) {
      const auto elements = fields.find(of + std::string(kValues));
      const auto sizes = fields.find(of + std::string(kSizes));
      if (elements == fields.end() || sizes == fields.end() ||
          !at::equal(sizes->second.cpu(), at::tensor(parameter.sizes())))
        files::refuse("sparse state \"" + of + "\" is not complete, or of other sizes");
      values[of] = at::sparse_coo_tensor(tensor, elements->second, parameter.sizes()).coalesce();
    } else if (without(kValues, name).empty() && without(kSizes, name).empty()) {
      values[name] = tensor;
    }
  }
  return values;
}

NamedValues blank_values(const std::vector<rref::StoredTensor>& tensors,
                         const at::Tensor& parameter) {
  NamedValues values;
  for (const auto& [name, dtype, sizes] : tensors) {
    const auto* const type = files::find_type(&files::ElementType::safetensors, dtype);
    if (type == nullptr) files::refuse("state has a type that this libtorch has not");
    const at::Tensor one = at::zeros({}, at::TensorOptions(type->type));
    if (const auto of = without(kValues, name); !of.empty()) {
      values[of] = one.expand(parameter.sizes());
    } else if (without(kIndices, name).empty() && without(kSizes, name).empty()) {
      values[name] = one.expand(sizes);
    }
  }
  return values;
}

}  // namespace stitch::optim
