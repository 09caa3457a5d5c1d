#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "stitch/base/error.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch {

namespace rpc {
class PeerTable;
}  // namespace rpc
struct TargetOptions;

// What a thread of the program does whose call finds Options::max_inflight_bytes or
// max_inflight_calls of its peer used up: it waits its turn, or the call fails with `overloaded` at
// once. Calls of handlers never wait (docs/running.md).
enum class WhenFull : std::uint8_t { wait, refuse };

// Whom to call and for how long to wait: implicit from a name, a WorkerId, a WorkerInfo, or
// `{.to = "ps0", .timeout = 5s}`. A timeout of zero means none; without one Options::rpc_timeout
// counts. In a `co_await`, give a braced one a name: g++ 12 destroys it twice there.
//
// `{.to = "ps0", .into = tensor}` or Target("ps0").into(tensor): rpc_sync and rpc_async of a
// function that returns a tensor receive it into this one and return it; a result that requires
// grad comes as a tensor of its own over the same memory and version counter. A contiguous tensor
// of more than Options::inline_bytes is read into without a further copy over "shm" and "tcp". It
// must have the result's dtype and sizes, be dense, on the CPU or the CUDA device that the result
// comes to, and not require grad: else the call fails with invalid_argument. Until the future is
// ready the memory is the call's; its content is unspecified when the call fails, and an answer
// that is just arriving may still be written into it after a timeout or cancel(). Thread contract:
// as a value.
class Target {
 public:
  // The worker of that name or id, with the usual timeout. Implicit by design, all of them.
  Target(const char* name) : to_(checked(name)) {}           // NOLINT
  Target(std::string name) : to_(std::move(name)) {}         // NOLINT
  Target(std::string_view name) : to_(std::string(name)) {}  // NOLINT
  Target(WorkerId id) : to_(id) {}                           // NOLINT
  Target(WorkerInfo info) : to_(std::move(info)) {}          // NOLINT
  Target(TargetOptions options);                             // NOLINT
  // A number is no target: write WorkerId(0). (A literal 0 would be taken for a null string.)
  template <class T>
  requires std::is_arithmetic_v<T> || std::is_null_pointer_v<T> Target(
      T worker_ids_are_written_WorkerId)
  = delete;  // NOLINT

  // The worker meant. Throws Error(not_found) when there is none of that name or id.
  [[nodiscard]] const WorkerInfo& resolve(const rpc::PeerTable& peers) const;
  // Of calls to this target; none: Options::rpc_timeout.
  [[nodiscard]] std::optional<std::chrono::nanoseconds> timeout() const noexcept {
    return timeout_;
  }
  // As TargetOptions::when_full.
  [[nodiscard]] WhenFull when_full() const noexcept { return when_full_; }
  // This target, with a tensor to receive the result into.
  [[nodiscard]] Target into(at::Tensor tensor) const {
    Target target = *this;
    target.into_ = std::move(tensor);
    return target;
  }
  // Throws Error(invalid_argument) when there is one: `what` brings no result here.
  void expect_no_into(std::string_view what) const {
    if (into_.defined())
      throw Error(ErrorCode::invalid_argument,
                  std::string(what) + " brings no result to be received into a tensor");
  }
  // That tensor, undefined when there is none.
  [[nodiscard]] const at::Tensor& into() const noexcept { return into_; }

 private:
  static std::string checked(const char* name) {
    if (name == nullptr) {
      throw Error(ErrorCode::invalid_argument,
                  "a null pointer is not the name of a worker; write WorkerId(0) for worker 0");
    }
    return name;
  }

  std::variant<std::string, WorkerId, WorkerInfo> to_;
  std::optional<std::chrono::nanoseconds> timeout_;
  at::Tensor into_;
  WhenFull when_full_ = WhenFull::wait;
};

// The aggregate behind `{.to = ..., .timeout = ..., .into = ...}`.
struct TargetOptions {
  Target to;                                          // whom to call
  std::optional<std::chrono::nanoseconds> timeout{};  // default Options::rpc_timeout; 0: none
  at::Tensor into{};                                  // receives the result, as Target says
  WhenFull when_full = WhenFull::wait;                // while the budget of the peer is full
};

inline Target::Target(TargetOptions options) : Target(std::move(options.to)) {
  timeout_ = options.timeout;
  into_ = std::move(options.into);
  when_full_ = options.when_full;
}

}  // namespace stitch
