// What a PeerTable sends, and how it ends.

#include <chrono>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/peer_table.h"

namespace stitch::rpc {

// ---- sending

void PeerTable::send(const WorkerInfo& to, const ConnectionPtr& connection,
                     transport::Message message, transport::SendDone done, std::uint64_t call_id) {
  Life& life = known(to);
  if (connection) {
    connection->send(std::move(message), std::move(done));
  } else {
    life.session->send(std::move(message), std::move(done), call_id);
  }
}

void PeerTable::reach(WorkerId id) { reach(*members_.life(id)); }

void PeerTable::try_to_reach(const WorkerInfo& info) {
  Life* life = members_.life(info.id, info.epoch);
  if (life == nullptr) return;
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(*life).try_to_connect(effects);
  }
  perform(*life, std::move(effects));
}

void PeerTable::reach(Life& life) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(life).connect(effects);
  }
  perform(life, std::move(effects));
}

bool PeerTable::help(base::AwaitedFlag& done, std::chrono::steady_clock::time_point deadline) {
  for (const auto& endpoint : endpoints_) {
    if (endpoint->help(done, deadline)) return true;
  }
  return done.is_set();
}

// ---- ending

void PeerTable::give_up(const WorkerInfo& given_up, const Error& reason) {
  give_up(known(given_up), reason);
}

void PeerTable::give_up(Life& life, const Error& reason) {
  Effects effects;
  {
    base::MutexLock lock(mutex_);
    peer(life).give_up(reason, effects);
  }
  perform(life, std::move(effects));
}

void PeerTable::expect_closing() {
  base::MutexLock lock(mutex_);
  closing_ = true;
  members_.for_each([&](Life& life)
                        STITCH_NO_THREAD_SAFETY_ANALYSIS { peer(life).expect_closing(); });
}

void PeerTable::close() noexcept {
  expect_closing();
  heartbeats_.stop();
  say_goodbye();
  for (const auto& endpoint : endpoints_) endpoint->close();
  for (const auto& endpoint : endpoints_) endpoint->join();
  const Error closed(ErrorCode::shutting_down, "this worker has shut down");
  std::vector<Life*> lives;
  {
    base::MutexLock lock(mutex_);
    early_.clear();
    strangers_.clear();
    members_.for_each([&](Life& life) {
      for (Life* each = &life; each != nullptr; each = each->previous) lives.push_back(each);
    });
  }
  for (Life* life : lives) {
    Effects effects;
    {
      base::MutexLock lock(mutex_);
      peer(*life).close(closed, effects);
    }
    perform(*life, std::move(effects));
  }
}

// Spares the peers the attempt to replace their connections to this worker.
void PeerTable::say_goodbye() {
  std::vector<ConnectionPtr> bound;
  {
    base::MutexLock lock(mutex_);
    members_.for_each([&](Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
      const auto& connection = peer(life).bound();
      if (connection && life.info().id != self_) bound.push_back(connection->connection);
    });
  }
  Bind gone;
  gone.step = Bind::Step::gone;
  for (const auto& connection : bound) connection->send(gone.encode(), nullptr);
}

}  // namespace stitch::rpc
