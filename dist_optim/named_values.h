#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace stitch::optim {

// Options and state of an optimizer as plain values with names. This is what is sent between
// workers and saved in checkpoints: no code, no file names, nothing that is interpreted. A tuple
// of numbers (betas) is a vector of them; an undefined tensor is left out.
using NamedValue =
    std::variant<bool, std::int64_t, double, std::vector<double>, std::string, at::Tensor>;
using NamedValues = std::map<std::string, NamedValue>;

// Collects the fields of a struct: pass it to a function that calls `field(name, value)` for each.
// Tensors are not copied: later steps change the collected ones. Thread contract: one thread.
class FieldCollector {
 public:
  explicit FieldCollector(NamedValues& values) : values_(values) {}

  void operator()(std::string_view name, bool value) { put(name, value); }
  template <std::integral T>
  requires(!std::same_as<T, bool>) void operator()(std::string_view name, T value) {
    put(name, static_cast<std::int64_t>(value));
  }
  template <std::floating_point T>
  void operator()(std::string_view name, T value) {
    put(name, static_cast<double>(value));
  }
  void operator()(std::string_view name, const std::string& value) { put(name, value); }
  void operator()(std::string_view name, const at::Tensor& value);
  void operator()(std::string_view name, const std::vector<double>& value) { put(name, value); }
  template <std::same_as<double>... Ts>
  void operator()(std::string_view name, const std::tuple<Ts...>& value) {
    put(name, std::apply([](auto... each) { return std::vector<double>{each...}; }, value));
  }

 private:
  void put(std::string_view name, NamedValue value) {
    values_.insert_or_assign(std::string(name), std::move(value));
  }

  NamedValues& values_;
};

// Among the values of a parameter's state: its master copy in fp32, where it has one
// (ShadowParameter).
inline constexpr const char* kMasterName = "master";

// The type of a parameter's state: float32 for one of half precision.
[[nodiscard]] at::ScalarType state_type(const at::Tensor& parameter);
// Throws Error(invalid_argument) for a tensor that does not have these sizes (or, where a number
// for each row will do, those of `parameter`) and the state_type() of `parameter`.
void check_state_tensor(std::string_view name, const NamedValue& value, const at::Tensor& parameter,
                        at::IntArrayRef sizes);

// A value as a tensor: of int64, float64 or bool, and of bytes for a text. Tensors stay.
[[nodiscard]] at::Tensor tensor_of(const NamedValue& value);
// Whether `value` is what tensor_of() makes of a value of the type of `like`, which `to` becomes.
[[nodiscard]] bool value_in_tensor(const NamedValue& value, const NamedValue& like, NamedValue& to);

// Writes values back into the fields of a struct. A tensor_of() a value stands for it. Strict: a
// value of another type, one that is missing (tensors may be: they become undefined) or, at
// finish(), one that no field took is an Error(invalid_argument) that names it. Thread contract:
// one thread.
class FieldAssigner {
 public:
  // `what` begins the errors: "options of torch::optim::SGD". Both arguments must outlive this.
  FieldAssigner(const NamedValues& values, std::string_view what) : values_(values), what_(what) {}

  void operator()(std::string_view name, bool& field) { field = need<bool>(name); }
  template <std::integral T>
  requires(!std::same_as<T, bool>) void operator()(std::string_view name, T& field) {
    const std::int64_t value = need<std::int64_t>(name);
    if (!std::in_range<T>(value)) out_of_range(name, value);
    field = static_cast<T>(value);
  }
  template <std::floating_point T>
  void operator()(std::string_view name, T& field) {
    field = static_cast<T>(need<double>(name));
  }
  void operator()(std::string_view name, std::string& field) { field = need<std::string>(name); }
  void operator()(std::string_view name, at::Tensor& field);
  void operator()(std::string_view name, std::vector<double>& field) {
    field = need<std::vector<double>>(name);
  }
  template <std::same_as<double>... Ts>
  void operator()(std::string_view name, std::tuple<Ts...>& field) {
    const auto& value = need<std::vector<double>>(name);
    if (value.size() != sizeof...(Ts)) wrong_length(name, value.size(), sizeof...(Ts));
    std::size_t i = 0;
    std::apply([&](auto&... each) { ((each = value[i++]), ...); }, field);
  }

  // Throws when there are values that no field has taken.
  void finish() const;

 private:
  template <class T>
  const T& need(std::string_view name) {
    const NamedValue* const value = take(name);
    if (value == nullptr) missing(name);
    if (const T* const typed = std::get_if<T>(value)) return *typed;
    if (value_in_tensor(*value, NamedValue(T()), converted_)) return std::get<T>(converted_);
    wrong_type(name, *value, NamedValue(T()));
  }
  const NamedValue* take(std::string_view name);
  [[noreturn]] void missing(std::string_view name) const;
  [[noreturn]] void wrong_type(std::string_view name, const NamedValue& given,
                               const NamedValue& wanted) const;
  [[noreturn]] void wrong_length(std::string_view name, std::size_t given,
                                 std::size_t wanted) const;
  [[noreturn]] void out_of_range(std::string_view name, std::int64_t given) const;

  const NamedValues& values_;
  const std::string_view what_;
  std::vector<std::string_view> taken_;
  NamedValue converted_;
};

// Moves tensors among the fields of a struct to a device; other fields stay as they are. Thread
// contract: one thread.
class FieldMover {
 public:
  explicit FieldMover(c10::Device device) : device_(device) {}
  void operator()(std::string_view name, at::Tensor& field) const;
  template <class T>
  void operator()(std::string_view, T&) const {}

 private:
  const c10::Device device_;
};

// "a bool", "an integer", ...: the type of a value, for errors.
[[nodiscard]] std::string_view type_text(const NamedValue& value);

}  // namespace stitch::optim
