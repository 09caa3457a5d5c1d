#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "stitch/rpc/message/worker_info.h"

namespace stitch::rref {

class RRefAgent;

// Where a request stands among those made through one ordered handle.
struct PlaceInOrder {
  std::uint64_t stream = 0;  // names the handle; unique among those of one worker's life
  std::uint64_t number = 0;  // from 0, without gaps
};

// The caller's end of an ordered handle (RRef::ordered): numbers its requests, and tells the owner
// which numbers will not come and when the last has been given. Shared by the copies of the handle
// and by its requests until they have been sent. Thread contract: any thread.
class CallOrder {
 public:
  CallOrder(std::shared_ptr<RRefAgent> rrefs, const WorkerInfo& owner);
  ~CallOrder();
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;

  [[nodiscard]] std::uint64_t stream() const noexcept { return stream_; }
  // The number of a request that nothing keeps from being sent any more. If it still had to wait
  // for room, those behind it could have taken that, and wait for it at the owner.
  [[nodiscard]] std::uint64_t next() noexcept { return next_.fetch_add(1); }
  // That request certainly never left: those behind it must not wait for it.
  void skip(std::uint64_t number) const noexcept;

 private:
  void tell(bool end, std::uint64_t number) const noexcept;

  const std::shared_ptr<RRefAgent> rrefs_;
  const WorkerInfo owner_;
  const std::uint64_t stream_;
  std::atomic<std::uint64_t> next_{0};
};

}  // namespace stitch::rref
