#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "stitch/base/recycler.h"
#include "stitch/rpc/agent/session.h"

namespace stitch::rpc {

// A message from send() until the peer has received it; part of Session. `message`, `number` and
// `bytes` are constant but for withdraw().
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
  std::atomic<bool> told{false};
  std::atomic<std::uint32_t> holders{1};
};

}  // namespace stitch::rpc
