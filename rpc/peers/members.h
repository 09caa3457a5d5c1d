#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/published_table.h"
#include "stitch/rpc/gpu/device_map.h"
#include "stitch/rpc/message/peer_limits.h"
#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/peers/peer_flow.h"
#include "stitch/transport/endpoint.h"

namespace stitch::rpc {

class Peer;
class Session;

// A worker as the rendezvous found it, or as it joined.
struct Member {
  WorkerInfo info;
  std::vector<std::string> addresses;  // where it listens, best first
  WorkerDevices devices{};
  bool same_host = false;  // as far as its record says
  PeerLimits limits{};     // those that it sets
};

// One life of a worker, with its session, connections and counts. Owned by Members, as long as this
// worker's agent exists. Thread contract: as the comments say.
struct PeerLife {
  PeerLife(Member its_member, PeerLife* former);
  ~PeerLife();

  [[nodiscard]] const WorkerInfo& info() const noexcept { return member.info; }

  const Member member;
  PeerLife* const previous;          // the former life of the same worker, if this worker knew it
  std::shared_ptr<Session> session;  // constant
  std::shared_ptr<Session> echo;     // of this worker itself: its accepting half; else null
  std::unique_ptr<Peer> peer;  // guarded by the mutex of the PeerTable; the pointer is constant
  // The last arrival of bytes, as of the last PeerTable::links() or the end of a connection.
  std::atomic<std::chrono::steady_clock::rep> heard{0};
  std::optional<PeerFlow> flow;   // constant once complete
  std::atomic<bool> over{false};  // dead, left, or followed by another: its messages are dropped
  std::atomic<bool> announced{false};      // the extensions know of it: it may connect
  std::atomic<bool> lost{false};           // its connection is over: its calls are stopped
  std::atomic<bool> loss_reported{false};  // to the extensions, too
};

// The workers of one world, each with its present life and its former lives. Part of PeerTable. A
// life takes about 2.5 KiB, with its session, peer and flow, and stays until the end: readers take
// no lock, and calls, connections and timers refer to a life without owning it. Thread contract:
// any thread; only add() takes a lock, and one thread at a time calls it.
class Members {
 public:
  Members() = default;
  ~Members();

  // Called once a life is complete, before other threads see it.
  using Complete = std::function<void(PeerLife&)>;
  // Adds a new worker, or a life that follows the present one of its worker. Throws
  // Error(invalid_argument) for an id or name of another worker, an epoch that is not higher, or an
  // id that is too large. Nothing has changed when it throws.
  PeerLife& add(Member member, const Complete& complete);
  // The error that add() would throw.
  [[nodiscard]] std::optional<Error> refusal(const WorkerInfo& info) const;

  // The number of workers, gone ones included.
  [[nodiscard]] std::size_t size() const noexcept { return size_.load(std::memory_order_acquire); }
  // The present life of each, by id.
  [[nodiscard]] std::vector<WorkerInfo> infos() const;
  template <class F>
  void for_each(F&& f) const {
    lives_.for_each(f);
  }
  // The present life; null for an id that is not in this world.
  [[nodiscard]] PeerLife* life(WorkerId id) const noexcept { return lives_.at(id.value()); }
  // Exactly this life, also when it is over; null for an unknown life.
  [[nodiscard]] PeerLife* life(WorkerId id, std::uint64_t epoch) const noexcept {
    PeerLife* found = life(id);
    while (found != nullptr && found->info().epoch != epoch) [[unlikely]] found = found->previous;
    return found;
  }
  // Throw Error(not_found) naming what was looked for, and the nearest names or the range of
  // ids; the last one Error(disconnected) for a member of another epoch, be that over or not known
  // here yet; an empty name in it stands for any. What they return is valid as long as this.
  [[nodiscard]] const WorkerInfo& find(std::string_view name) const;
  [[nodiscard]] const WorkerInfo& find(WorkerId id) const;
  [[nodiscard]] const WorkerInfo& find(const WorkerInfo& info) const;
  // The error of a peer whose `hello` is not that of a member.
  [[nodiscard]] std::optional<Error> objection(const transport::Hello& hello) const;
  // "worker "ps0" (id 7, epoch 1)", for error texts.
  [[nodiscard]] static std::string claimed_identity(const transport::Hello& hello);

 private:
  struct Name {
    Name(std::string its_name, WorkerId its_id) : name(std::move(its_name)), id(its_id) {}
    std::string name;
    WorkerId id;
    Name* next = nullptr;
  };
  static constexpr std::size_t kBuckets = 1024;
  [[nodiscard]] std::atomic<Name*>& bucket(std::string_view name) const;
  [[nodiscard]] const Name* named(std::string_view name) const;

  base::PublishedTable<PeerLife> lives_;  // by id
  std::atomic<std::size_t> size_{0};
  mutable std::atomic<Name*> names_[kBuckets]{};  // lists that only grow, at their heads
};

}  // namespace stitch::rpc
