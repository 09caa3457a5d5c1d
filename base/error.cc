#include "stitch/base/error.h"

#include <cxxabi.h>

#include <array>
#include <atomic>
#include <new>
#include <typeinfo>
#include <utility>

#include "stitch/base/demangle.h"

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

// Errors are made where memory is short, also in destructors: one for which there is none keeps its
// code, without its text.
Error::Error(ErrorCode code, std::string text) {
  static const auto spares = [] {  // made below, before main()
    std::array<std::shared_ptr<const Fields>, kNames.size()> made;
    for (std::size_t i = 0; i < made.size(); ++i) {
      made[i] = std::make_shared<const Fields>(
          Fields{static_cast<ErrorCode>(i), false, "std::bad_alloc", {}, {}});
    }
    return made;
  }();
  try {
    fields_ = std::make_shared<const Fields>(Fields{code, false, std::move(text), {}, {}});
  } catch (const std::bad_alloc&) {
    const auto index = static_cast<std::size_t>(code);
    fields_ = spares[index < spares.size() ? index : static_cast<std::size_t>(ErrorCode::internal)];
  }
}

namespace {
// Replaces `fields` by a changed copy; there is none where there is no memory for it.
template <class Fields, class Change>
void replace(std::shared_ptr<const Fields>& fields, Change&& change) {
  try {
    auto copy = std::make_shared<Fields>(*fields);
    change(*copy);
    fields = std::move(copy);
  } catch (const std::bad_alloc&) {
    // It says less.
  }
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
const Error out_of_memory(ErrorCode::internal, "std::bad_alloc");
}  // namespace

void set_reason_reader(ReasonReader reader) noexcept { reason_reader.store(reader); }

Error to_error(const std::exception_ptr& exception) noexcept {
  try {
    if (!exception) return Error(ErrorCode::internal, "an error without an exception");
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (...) {
    try {
      return Error(ErrorCode::internal, describe(std::current_exception()));
    } catch (...) {
      return out_of_memory;
    }
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

}  // namespace stitch
