#include "stitch/base/error.h"

#include <cxxabi.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <typeinfo>
#include <utility>

namespace stitch {

namespace {
constexpr std::array<std::string_view, 15> kNames{
    "unknown",      "invalid_argument", "timeout",         "cancelled", "disconnected",
    "overloaded",   "unimplemented",    "unauthenticated", "protocol",  "remote_exception",
    "out_of_range", "shutting_down",    "internal",        "not_found", "already_exists"};
}  // namespace

std::string_view to_string(ErrorCode code) noexcept {
  const auto index = static_cast<std::size_t>(code);
  return index < kNames.size() ? kNames[index] : kNames[0];
}

Error::Error(ErrorCode code, std::string text)
    : fields_(std::make_shared<const Fields>(Fields{code, false, std::move(text), {}, {}})) {}

namespace {
// Replaces `fields` by a changed copy.
template <class Fields, class Change>
void replace(std::shared_ptr<const Fields>& fields, Change&& change) {
  auto copy = std::make_shared<Fields>(*fields);
  change(*copy);
  fields = std::move(copy);
}
}  // namespace

Error Error::with_worker(std::string worker) const {
  Error copy = *this;
  replace(copy.fields_, [&](Fields& fields) { fields.worker = std::move(worker); });
  return copy;
}

Error Error::with_function(std::string function) const {
  Error copy = *this;
  replace(copy.fields_, [&](Fields& fields) { fields.function = std::move(function); });
  return copy;
}

Error Error::with_remote(bool remote) const {
  Error copy = *this;
  replace(copy.fields_, [&](Fields& fields) { fields.remote = remote; });
  return copy;
}

Error Error::with_prefix(std::string_view prefix) const {
  Error copy = *this;
  replace(copy.fields_,
          [&](Fields& fields) { fields.text = std::string(prefix) + ": " + fields.text; });
  return copy;
}

namespace {
constinit std::atomic<ReasonReader> reason_reader{nullptr};
}  // namespace

void set_reason_reader(ReasonReader reader) noexcept { reason_reader.store(reader); }

Error to_error(const std::exception_ptr& exception) noexcept {
  try {
    if (!exception) return Error(ErrorCode::internal, "an error without an exception");
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (...) {
    return Error(ErrorCode::internal, describe(std::current_exception()));
  }
}

std::string describe(const std::exception_ptr& exception) {
  if (!exception) return "an error without an exception";
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& error) {
    const std::string type = base::demangle(typeid(error).name());
    const ReasonReader reader = reason_reader.load();
    if (const auto reason = reader ? reader(error) : std::nullopt) return type + ": " + *reason;
    const char* const what = error.what();
    return what == nullptr ? type + " without a text" : type + ": " + what;
  } catch (const std::string& text) {
    return "std::string: " + text;
  } catch (const char* text) {  // also catches nullptr
    return text == nullptr ? "a null const char*" : std::string("const char*: ") + text;
  } catch (...) {
    const std::type_info* const type = abi::__cxa_current_exception_type();
    return type == nullptr
               ? "an exception of another language"
               : base::demangle(type->name()) + ", which is not derived from std::exception";
  }
}

namespace base {

std::string demangle(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  return status == 0 && readable ? readable.get() : mangled;
}

}  // namespace base

}  // namespace stitch
