#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace stitch {

namespace rpc {
class Watcher;
}  // namespace rpc

// Why a worker is no member of the world any more.
enum class LeaveReason : std::uint8_t {
  left,  // it shut down
  dead   // it was killed, has ended without a word, or was not heard of in time
};

// "left" or "dead".
[[nodiscard]] std::string_view to_string(LeaveReason reason) noexcept;

// A callback given to Worker::on_join() or Worker::on_leave(), which is called as long as this and
// the worker live. Owned by value; moving it moves the registration. May outlive its Worker. Thread
// contract: stop() and the destructor from any thread, one at a time.
class [[nodiscard("the callback is called only as long as this lives")]] MembershipWatch {
 public:
  // Watches nothing.
  MembershipWatch() noexcept = default;
  MembershipWatch(MembershipWatch &&) noexcept = default;
  // What this has watched before is not watched any more.
  MembershipWatch& operator=(MembershipWatch&& other) noexcept;
  // As stop().
  ~MembershipWatch();

  // The callback is not called any more once this returns: waits for a call of it that runs on
  // another thread. In the callback itself it returns at once.
  void stop() noexcept;

  // For Worker.
  explicit MembershipWatch(std::shared_ptr<rpc::Watcher> watcher) noexcept;

 private:
  std::shared_ptr<rpc::Watcher> watcher_;
};

}  // namespace stitch
