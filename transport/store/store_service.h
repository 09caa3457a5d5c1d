#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "stitch/transport/store/store_map.h"
#include "stitch/transport/store/tcp_store_protocol.h"

namespace stitch::transport {

// What the server of a TCP store knows, without any I/O: the values, the claims of its clients and
// the requests that wait. Thread contract: not thread-safe; the server locks.
class StoreService {
 public:
  using Client = std::uint64_t;
  struct Reply {
    Client client;
    StoreReply reply;
  };

  // Values, claims and waits together may take `max_bytes`; beyond it requests are answered with
  // `overloaded`.
  explicit StoreService(std::size_t max_bytes) : max_bytes_(max_bytes) {}

  // Performs the request of a client. Returns the replies that are due now, also those of other
  // clients that waited for it.
  [[nodiscard]] std::vector<Reply> serve(Client client, const StoreRequest& request);
  // The client has gone: its claims and waits end.
  void forget(Client client);

 private:
  struct Wait {
    StoreOperation operation;
    std::string key;
    std::size_t count;
  };

  [[nodiscard]] StoreReply reply_now(Client client, const StoreRequest& request);
  // Takes the reply of a request that may wait, when it is due. `now`: it is due in any case.
  [[nodiscard]] bool take_reply(const Wait& wait, bool now, StoreReply& reply) const;
  void stop_waiting(Client client, std::uint64_t number, std::vector<Reply>& replies);
  void wake(const std::string& key, StoreOperation operation, std::vector<Reply>& replies);
  // Counts `added` bytes and gives `freed` up. Throws Error(overloaded), without a change.
  void take(std::size_t added, std::size_t freed);

  const std::size_t max_bytes_;
  std::size_t used_ = 0;
  StoreMap map_;
  std::map<Client, std::vector<std::string>> claimed_;
  std::map<std::pair<Client, std::uint64_t>, Wait> waits_;
};

}  // namespace stitch::transport
