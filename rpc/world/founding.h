#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rpc/options/options.h"
#include "stitch/rpc/world/world_record.h"
#include "stitch/transport/store/store.h"

namespace stitch::rpc {

// How a worker gets its place in a world, at a store. It claims `member/<token>` with who it is and
// where it has bound its sockets; the claim ends with its process. One worker leads: rank 0, in an
// elastic world the first to claim `leader`. It waits until there are claims enough, checks them,
// gives ids and epochs, and writes the world; each other founder reads that. A world that runs has
// a live worker that holds `keeper` (WorldKeeper); it answers a claim under `answer/<token>`. A
// founding of N takes 2N + 5 requests, of an elastic world N more. A founder that dies has no claim
// any more, and its next life claims again; where two live, with one name or rank or with other
// sizes, all get an error. Lives within join_world(). Thread contract: one thread.
class Founding {
 public:
  // A claim of a former life ends within this time.
  static constexpr std::chrono::milliseconds kFormerTime{1000};
  // A world that no worker keeps for so long is dead, an elastic one after heartbeat_timeout more:
  // the next keeper comes with a verdict. Of a fixed one, all workers have come again by then.
  static constexpr std::chrono::milliseconds kKeeperTime{4000};
  // In which the keeper of a world comes back to a TCP store whose host was started again.
  static constexpr std::chrono::milliseconds kReturnTime{3000};

  struct Leading {
    bool leads = false;    // this worker founds the world
    bool stands = false;   // it does where it is the first to claim `leader`
    bool returns = false;  // the store may be a new one of a world that runs
  };
  // The references outlive this object.
  Founding(const Options& options, transport::Store& store, Leading leading,
           std::chrono::steady_clock::time_point deadline)
      : options_(options), store_(store), leading_(leading), deadline_(deadline) {}

  struct Place {
    WorldRecord world;  // this worker is in it
    // Of the one that has founded the world: it keeps it.
    std::unique_ptr<transport::Store::Claim> keeper{};
  };
  // Blocks until this worker has a place. Throws why it has none; Error(timeout) at the deadline,
  // naming the workers that have arrived; what the store throws.
  [[nodiscard]] Place find_place(const MemberClaim& self);

  using Claims = std::map<std::string, std::string>;
  // The world of these workers: ids are ranks, and those without one get the lowest that are free.
  // Throws why they form none.
  [[nodiscard]] static WorldRecord form(const Claims& claims, const WorldSize& size,
                                        std::uint64_t number);

 private:
  using Clock = std::chrono::steady_clock;
  using Timeout = transport::Store::Timeout;
  using Holder = std::unique_ptr<transport::Store::Claim>;

  [[nodiscard]] std::optional<WorldRecord> read(const std::string& key, Timeout timeout);
  [[nodiscard]] bool is_kept();
  [[nodiscard]] Holder claim_world(bool runs, std::uint64_t number);
  [[nodiscard]] std::optional<Place> found(bool runs, const std::string& token);
  void fail(const Claims& claims, const Error& why);
  [[nodiscard]] Timeout at_most(Timeout timeout) const;
  [[nodiscard]] Error late(bool runs);

  const Options& options_;
  transport::Store& store_;
  const Leading leading_;
  const Clock::time_point deadline_;
  std::optional<Clock::time_point> dead_since_;  // since when no worker keeps the recorded world
};

}  // namespace stitch::rpc
