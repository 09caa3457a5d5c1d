// What a PeerTable sends, and how it ends.

#include <chrono>
#include <exception>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/patience.h"
#include "stitch/rpc/agent/peer_table.h"

namespace stitch::rpc {

// ---- sending

void PeerTable::send(const WorkerInfo& to, const ConnectionPtr& connection,
                     transport::Message message, transport::SendDone done, std::uint64_t call_id) {
  Life& life = known(to);
  if (!life.sent.load(std::memory_order_relaxed)) life.sent.store(true, std::memory_order_relaxed);
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
  base::patiently([&] {
    base::MutexLock lock(mutex_);
    peer(life).give_up(reason, effects);
  });
  perform(life, std::move(effects));
}

void PeerTable::expect_closing() {
  base::MutexLock lock(mutex_);
  closing_ = true;
  members_.for_each([&](Life& life)
                        STITCH_NO_THREAD_SAFETY_ANALYSIS { peer(life).expect_closing(); });
}

// There is no one to throw to: a short lack of memory is waited for.
void PeerTable::close() {
  expect_closing();
  say_goodbye();
  for (const auto& endpoint : endpoints_) base::patiently([&] { endpoint->close(); });
  for (const auto& endpoint : endpoints_) base::patiently([&] { endpoint->join(); });
  const Error closed =
      base::patiently([] { return Error(ErrorCode::shutting_down, "this worker has shut down"); });
  std::vector<Life*> lives;
  base::patiently([&] {
    lives.clear();
    base::MutexLock lock(mutex_);
    early_.clear();
    strangers_.clear();
    members_.for_each([&](Life& life) {
      for (Life* each = &life; each != nullptr; each = each->previous) lives.push_back(each);
    });
  });
  for (Life* life : lives) {
    base::patiently([&] {
      Effects effects;
      {
        base::MutexLock lock(mutex_);
        peer(*life).close(closed, effects);
      }
      perform(*life, std::move(effects));
    });
  }
}

void PeerTable::close_once_memory_allows() noexcept {
  for (;;) {
    try {
      return close();
    } catch (const std::bad_alloc&) {
      // Nothing tells when there is memory again.
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

// Spares the peers the attempt to replace their connections to this worker. One that is not told,
// since there is no memory for that, finds it out.
void PeerTable::say_goodbye() noexcept {
  try {
    std::vector<ConnectionPtr> bound;
    base::patiently([&] {
      bound.clear();
      base::MutexLock lock(mutex_);
      members_.for_each([&](Life& life) STITCH_NO_THREAD_SAFETY_ANALYSIS {
        const auto& connection = peer(life).bound();
        if (connection && life.info().id != self_) bound.push_back(connection->connection);
      });
    });
    Bind gone;
    gone.step = Bind::Step::gone;
    for (const auto& connection : bound)
      base::patiently([&] { connection->send(gone.encode(), nullptr); });
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace stitch::rpc
