#include "stitch/dist_optim/named_values.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>

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
  put(name, value.detach());
}

// The elements of a list of numbers or of a text.
template <class List>
using ElementOf = std::conditional_t<std::is_same_v<List, std::string>, std::uint8_t, double>;

at::Tensor tensor_of(const NamedValue& value) {
  return std::visit(
      [](const auto& each) -> at::Tensor {
        using T = std::decay_t<decltype(each)>;
        if constexpr (std::is_same_v<T, at::Tensor>) {
          return each;
        } else if constexpr (std::is_arithmetic_v<T>) {
          return at::scalar_tensor(each, c10::CppTypeToScalarType<T>::value);
        } else {
          return at::tensor(std::vector<ElementOf<T>>(each.begin(), each.end()));
        }
      },
      value);
}

bool value_in_tensor(const NamedValue& value, const NamedValue& like, NamedValue& to) {
  const auto* const tensor = std::get_if<at::Tensor>(&value);
  const at::Tensor made = tensor_of(like);
  if (tensor == nullptr || !tensor->defined() || tensor->layout() != at::kStrided ||
      tensor->scalar_type() != made.scalar_type() || tensor->dim() != made.dim())
    return false;
  const at::Tensor plain = tensor->cpu().contiguous();
  to = std::visit(
      [&](const auto& each) -> NamedValue {
        using T = std::decay_t<decltype(each)>;
        if constexpr (std::is_same_v<T, at::Tensor>) {
          return plain;
        } else if constexpr (std::is_arithmetic_v<T>) {
          return plain.item<T>();
        } else {
          const auto* const data = plain.data_ptr<ElementOf<T>>();
          return T(data, data + plain.numel());
        }
      },
      like);
  return true;
}

at::ScalarType state_type(const at::Tensor& parameter) {
  const bool half =
      parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16;
  return half ? at::kFloat : parameter.scalar_type();
}

void check_state_tensor(std::string_view name, const NamedValue& value, const at::Tensor& parameter,
                        at::IntArrayRef sizes) {
  const auto* const tensor = std::get_if<at::Tensor>(&value);
  if (tensor == nullptr || !tensor->defined()) return;
  // Where a number for each row will do, one for each element does, too.
  const bool fits =
      tensor->sizes() == sizes || (sizes.size() == 1 && tensor->sizes() == parameter.sizes());
  if (tensor->layout() == at::kStrided && fits && tensor->scalar_type() == state_type(parameter))
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
