#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "stitch/base/recycler.h"
#include "stitch/rpc/agent/session.h"

namespace stitch::rpc {

// A message from send() until the peer has received it; part of Session. `message`, `number` and
// `bytes` are constant but for replace() and change_time_left().
struct Session::Kept {
  static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }

  transport::Message message;
  transport::SendDone done;
  std::uint64_t call_id = 0;
  std::uint64_t number = 0;  // without kLarge
  std::size_t bytes = 0;
  std::size_t stream = 0;
  Kept* next = nullptr;  // under mutex_, as `sent`
  bool sent = false;     // to some connection
  // How many hold it, and in the highest bit whether its end has been told.
  std::atomic<std::uint32_t> state{1};

  static constexpr std::uint32_t kTold = std::uint32_t{1} << 31;
  [[nodiscard]] bool told() const noexcept {
    return (state.load(std::memory_order_acquire) & kTold) != 0;
  }
  [[nodiscard]] std::uint32_t holders() const noexcept {
    return state.load(std::memory_order_acquire) & ~kTold;
  }
  // One holder less; true for the last one. A sole holder stays the only one: others are added
  // under the lock, to what is in the list.
  [[nodiscard]] bool drop() noexcept {
    return holders() == 1 || (state.fetch_sub(1, std::memory_order_acq_rel) & ~kTold) == 1;
  }
};

}  // namespace stitch::rpc
