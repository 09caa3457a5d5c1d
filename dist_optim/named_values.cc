#include "stitch/dist_optim/named_values.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <sstream>
#include <system_error>

#include "stitch/base/error.h"

namespace stitch::optim {

namespace {

std::string in_quotes(std::string_view name) { return '"' + std::string(name) + '"'; }

[[noreturn]] void refuse(std::string_view what, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, std::string(what) + ' ' + why);
}

}  // namespace

std::string_view type_text(const NamedValue& value) {
  static constexpr std::string_view kTexts[] = {
      "a bool", "an integer", "a number", "a list of numbers", "a string", "a tensor"};
  static_assert(std::size(kTexts) == std::variant_size_v<NamedValue>);
  return kTexts[value.index()];
}

void FieldCollector::operator()(std::string_view name, const at::Tensor& value) {
  if (!value.defined()) return;
  put(name, value.is_cpu() ? value.detach().clone() : value.detach().cpu());
}

std::int64_t take_step(NamedValues& values) {
  const auto taken = values.extract(kStepName);
  const auto* const step = taken ? std::get_if<std::int64_t>(&taken.mapped()) : nullptr;
  if (step == nullptr || *step < 0) refuse("options", "have no number of the next step");
  return *step;
}

at::Tensor take_master(NamedValues& values) {
  const auto taken = values.extract(kMasterName);
  if (taken.empty()) return {};
  const auto* const master = std::get_if<at::Tensor>(&taken.mapped());
  if (master == nullptr) refuse("state has", std::string(kMasterName) + " that is no tensor");
  return *master;
}

NamedValues join_groups(const std::vector<NamedValues>& groups) {
  NamedValues values;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [name, value] : groups[i])
      values.emplace(std::to_string(i) + '.' + name, value);
  }
  return values;
}

std::vector<NamedValues> split_groups(const NamedValues& values) {
  std::map<std::size_t, NamedValues> groups;
  for (const auto& [name, value] : values) {
    std::size_t group = 0;
    const char* const end = name.data() + name.size();
    const auto [dot, error] = std::from_chars(name.data(), end, group);
    if (error != std::errc() || dot == end || *dot != '.')
      refuse("options", "have no group in " + in_quotes(name));
    groups[group].emplace(std::string(dot + 1, end), value);
  }
  std::vector<NamedValues> all;
  for (auto& [group, options] : groups) {
    if (group != all.size()) refuse("options", "have no group " + std::to_string(all.size()));
    all.push_back(std::move(options));
  }
  return all;
}

void check_state_tensor(std::string_view name, const NamedValue& value, const at::Tensor& parameter,
                        at::IntArrayRef sizes) {
  const auto* const tensor = std::get_if<at::Tensor>(&value);
  if (tensor == nullptr || !tensor->defined()) return;
  if (tensor->layout() == at::kStrided && tensor->sizes() == sizes &&
      tensor->scalar_type() == parameter.scalar_type())
    return;
  std::ostringstream why;
  why << in_quotes(name) << " of type " << tensor->scalar_type() << ' ' << tensor->sizes()
      << " for a parameter of type " << parameter.scalar_type() << ' ' << parameter.sizes();
  refuse("state has", why.str());
}

void FieldMover::operator()(std::string_view, at::Tensor& field) const {
  if (field.defined()) field = field.detach().to(device_).contiguous();
}

void FieldAssigner::operator()(std::string_view name, at::Tensor& field) {
  const NamedValue* const value = take(name);
  if (value == nullptr) {
    field = at::Tensor();
    return;
  }
  const auto* const tensor = std::get_if<at::Tensor>(value);
  if (tensor == nullptr) wrong_type(name, *value, NamedValue(at::Tensor()));
  field = *tensor;
}

const NamedValue* FieldAssigner::take(std::string_view name) {
  const auto found = values_.find(std::string(name));
  if (found == values_.end()) return nullptr;
  taken_.push_back(found->first);
  return &found->second;
}

void FieldAssigner::finish() const {
  for (const auto& [name, value] : values_) {
    if (std::find(taken_.begin(), taken_.end(), name) == taken_.end())
      refuse(what_, "have no " + in_quotes(name));
  }
}

void FieldAssigner::missing(std::string_view name) const {
  refuse(what_, "come without " + in_quotes(name));
}

void FieldAssigner::wrong_type(std::string_view name, const NamedValue& given,
                               const NamedValue& wanted) const {
  refuse(what_, "have " + std::string(type_text(given)) + " for " + in_quotes(name) +
                    ", it takes " + std::string(type_text(wanted)));
}

void FieldAssigner::wrong_length(std::string_view name, std::size_t given,
                                 std::size_t wanted) const {
  refuse(what_, "have " + std::to_string(given) + " numbers for " + in_quotes(name) +
                    ", it takes " + std::to_string(wanted));
}

void FieldAssigner::out_of_range(std::string_view name, std::int64_t given) const {
  refuse(what_, "have " + std::to_string(given) + " for " + in_quotes(name) +
                    ", which is out of the range of its type");
}

}  // namespace stitch::optim
