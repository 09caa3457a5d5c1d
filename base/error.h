#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace stitch {

// What went wrong, by what the caller can do about it.
enum class ErrorCode : std::uint8_t {
  invalid_argument = 1,  // fix the call: a name, value or type is wrong
  timeout,               // the deadline passed; the work may or may not have been done
  cancelled,             // the caller or its owner cancelled it
  disconnected,          // the peer, or this epoch of it, has ended
  overloaded,            // too much is in flight; try later
  unimplemented,         // the callee does not know this function or feature
  unauthenticated,       // the peer could not prove that it knows the secret
  protocol,              // the peer sent malformed bytes, or speaks another version
  remote_exception,      // the user's function threw on the callee
  out_of_range,          // an index, count or size is beyond its limit
  shutting_down,         // this worker or the peer is shutting down
  internal,              // a defect in stitch
  not_found,             // no worker of this world has that name or id
  already_exists,        // a worker of this world that is alive has that name or rank
};

// "invalid_argument", "timeout", ...
[[nodiscard]] std::string_view to_string(ErrorCode code) noexcept;

// The one exception type of stitch. Immutable after it is thrown; copies share their text, so
// copying never throws. Any thread may read an Error.
class Error : public std::exception {
 public:
  Error() : Error(ErrorCode::internal, "no error was stored here") {}  // to be read into
  // About no worker and no function, and not from a callee.
  Error(ErrorCode code, std::string text);

  // The same error, about a worker.
  [[nodiscard]] Error with_worker(std::string worker) const;
  // The same error, of a call of that function.
  [[nodiscard]] Error with_function(std::string function) const;
  // The same error, which arose on the callee or did not.
  [[nodiscard]] Error with_remote(bool remote) const;
  // The same error with "prefix: " in front of its text.
  [[nodiscard]] Error with_prefix(std::string_view prefix) const;

  // What a program decides by.
  [[nodiscard]] ErrorCode code() const noexcept { return fields_->code; }
  // For people: lower case, the subject first. docs/errors.md explains them.
  [[nodiscard]] const char* what() const noexcept override { return fields_->text.c_str(); }
  // The worker the error came from or is about; empty when it concerns none.
  [[nodiscard]] const std::string& worker() const noexcept { return fields_->worker; }
  // The remote function that was being called; empty when none was.
  [[nodiscard]] const std::string& function() const noexcept { return fields_->function; }
  // True when it happened on the callee, false when the caller's side found it.
  [[nodiscard]] bool remote() const noexcept { return fields_->remote; }

 private:
  struct Fields {
    ErrorCode code;
    bool remote = false;
    std::string text;
    std::string worker;
    std::string function;
  };
  std::shared_ptr<const Fields> fields_;
};

// The Error inside `exception`; anything else becomes ErrorCode::internal with the exception's
// text.
[[nodiscard]] Error to_error(const std::exception_ptr& exception) noexcept;
// The demangled dynamic type and the text of an exception, "std::runtime_error: no such row"; only
// the type of one that is not derived from std::exception. Null exceptions and texts are named as
// such.
[[nodiscard]] std::string describe(const std::exception_ptr& exception);

// Returns the reason of an exception of a library whose what() has more than that, a stack for
// example; nothing for other exceptions.
using ReasonReader = std::optional<std::string> (*)(const std::exception& exception);
// Has describe() use the texts that `reader` returns. One per process. Any thread.
void set_reason_reader(ReasonReader reader) noexcept;

namespace base {
// The readable form of a mangled C++ name; the name itself when it is not one. Any thread.
[[nodiscard]] std::string demangle(const char* mangled);
// Runs `task`; the Error that it throws.
template <class Task>
[[nodiscard]] std::optional<Error> failure_of(Task&& task) {
  try {
    task();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}
}  // namespace base

}  // namespace stitch
