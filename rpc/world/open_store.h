#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "stitch/rpc/options/options.h"
#include "stitch/transport/store/store.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::rpc {

// The store where the workers of a world meet.
struct OpenStore {
  // How long one request of a store from reopen() may take.
  static constexpr std::chrono::milliseconds kStoreTimeout{1000};
  // How long after the deadline of a worker that starts it may still wait for answers of a TCP
  // store, all requests together: it has to tell the others that it gives up.
  static constexpr std::chrono::milliseconds kGraceTime{1000};

  std::shared_ptr<transport::Store> store;
  std::shared_ptr<void> server{};  // on the worker that hosts the store; ends with its last owner
  // Connects to a TCP store anew, because the host may be another process by now; opens a file
  // anew, because it may have been deleted or replaced. Throws as the store does, that of TCP
  // within kStoreTimeout.
  std::function<std::shared_ptr<transport::Store>()> reopen{};
  bool served = false;  // by a worker: it is lost with that one, and may come back empty
  bool alone = false;   // no other worker can see it
};

// Opens the store that `options` names, which rank 0 hosts if it is a TCP store of stitch's. Its
// keys are those of this job, under torchrun of this restart. Errors as init(). No request to a TCP
// store lasts beyond `deadline` + kGraceTime, but for that of reopen(). `key` (may be null) is
// stretched from options.secret. REQUIRES: resolve_options().
[[nodiscard]] OpenStore open_store(const Options& options,
                                   std::shared_ptr<const transport::SecretKey> key,
                                   std::chrono::steady_clock::time_point deadline);

// Throws Error(invalid_argument) when worker `name` would listen on a network without a secret and
// STITCH_INSECURE is not set: any host that reaches the port could call any registered function.
void check_open_network(const std::string& name, bool has_secret, const std::string& address);

}  // namespace stitch::rpc
