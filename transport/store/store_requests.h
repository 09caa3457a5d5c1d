#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/event_loop.h"
#include "stitch/transport/store/byte_budget.h"
#include "stitch/transport/store/store_map.h"
#include "stitch/transport/store/store_session.h"
#include "stitch/transport/store/tcp_store_protocol.h"

namespace stitch::transport {

// The map of a store server and its clients' requests, including those that wait for keys. Owned by
// the server. Thread contract: the loop's thread only.
class StoreRequests : public std::enable_shared_from_this<StoreRequests> {
 public:
  // Values and waits together may take `max_bytes`; beyond it requests fail with `overloaded`.
  StoreRequests(base::EventLoop& loop, std::size_t max_bytes)
      : loop_(loop), budget_(std::make_shared<ByteBudget>(max_bytes)) {}

  // Performs a request and replies, now or once the keys are there. Throws Error(protocol) for a
  // malformed one.
  void perform(const std::shared_ptr<StoreSession>& session, std::span<const std::byte> frame);
  // Drops the waits of a session that has ended.
  void forget(const StoreSession& session);

 private:
  // A reply that waits for keys.
  struct Waiting {
    std::weak_ptr<StoreSession> session;
    std::uint64_t request = 0;
    bool wants_value = false;
    std::vector<std::string> keys;
    BudgetShare share;
    base::EventLoop::TimerId timer = 0;
  };

  base::Bytes reply_now(StoreOperation operation, const std::string& key,
                        base::ByteReader& arguments);
  // Makes room for a value of that size under `key`. Throws Error(overloaded).
  void make_room(const std::string& key, std::size_t value_bytes);
  void give_room_of(const std::string& key) noexcept;
  void wait_for(const std::shared_ptr<StoreSession>& session, std::uint64_t request,
                bool wants_value, std::vector<std::string> keys, Store::Timeout timeout);
  void on_timeout(StoreMap::WaitId wait, Store::Timeout timeout);
  void wake_waiting();
  void reply_to(const Waiting& waiting);

  base::EventLoop& loop_;
  const std::shared_ptr<ByteBudget> budget_;  // of values and waits
  StoreMap map_;
  std::unordered_map<StoreMap::WaitId, Waiting> waiting_;
};

}  // namespace stitch::transport
