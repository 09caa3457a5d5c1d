#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/world/member_record.h"
#include "stitch/rpc/world/open_store.h"
#include "stitch/rpc/world/world_record.h"

namespace stitch::rpc {

// Answers the workers that claim a place in the running world. Every worker has one; that of the
// live worker with the lowest id works, on a thread that it starts for that: it holds the claim
// `keeper`, which tells a world that runs from a dead one, looks for claims of workers that are no
// members, has them admitted, and writes their answers. A store that a worker serves may be away,
// which is not reported, and come back empty: it is needed for joins only, and looked for until it
// is there. What else goes wrong with the store is said once, on stderr. Part of what an Agent
// keeps until its end. Thread contract: any thread; no lock is held while it asks the agent.
class WorldKeeper : public std::enable_shared_from_this<WorldKeeper> {
 public:
  // `keeper`: the claim, where this worker has founded the world; may be null.
  WorldKeeper(OpenStore opened, std::uint64_t world,
              std::unique_ptr<transport::Store::Claim> keeper);
  ~WorldKeeper();
  // Ends the thread, which may be in a request to the store for at most kStoreTimeout. To be called
  // by the owner: the thread itself may be the last that refers to this object.
  void end() STITCH_EXCLUDES(mutex_);

  // To be called once, when the agent has started.
  void start(const std::shared_ptr<Agent>& agent) STITCH_EXCLUDES(mutex_);
  // The members have changed. Does not block.
  void on_change() STITCH_EXCLUDES(mutex_);
  // All workers have agreed to leave, or this one leaves as the last: nothing is to be joined any
  // more. Takes the record away, if it keeps it and the store answers within kStoreTimeout; returns
  // at `deadline` all the same. May be called again.
  void end_world(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // No new work is begun. Does not block.
  void stop() STITCH_EXCLUDES(mutex_);

 private:
  struct Decided {
    std::string token;
    std::optional<Error> refusal;  // nothing: it is a member
    bool here = true;              // false: the next keeper decides
  };

  void run() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool keeps(const Agent& agent) const;
  // False: a store that a worker serves is away.
  bool look_after_store(Agent& agent, bool keeps, bool ending) noexcept STITCH_EXCLUDES(mutex_);
  void try_store(Agent& agent, bool keeps, bool ending) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool claim_world(const Agent& agent);
  void read_founders();
  void answer_decided() STITCH_EXCLUDES(mutex_);
  void take_in(Agent& agent, const std::string& token, const std::string& value)
      STITCH_EXCLUDES(mutex_);
  void answer(const std::string& token, const WorldRecord& record);
  void refuse(const std::string& token, const Error& why);
  void decide(Decided decided) STITCH_EXCLUDES(mutex_);
  void report(const Agent& agent, const Error& failure);
  void start_thread() STITCH_EXCLUDES(mutex_);

  OpenStore opened_;         // constant once constructed
  const std::string where_;  // the store's name
  const std::uint64_t world_;

  // The thread only.
  std::shared_ptr<transport::Store> store_;          // null: to be opened again
  bool was_open_ = false;                            // this keeper has had it open
  std::unique_ptr<transport::Store::Claim> keeper_;  // null: another worker has it
  std::optional<std::set<std::string>> founders_;    // tokens; nothing: not read yet
  bool marked_ = false;                              // the store says that a world runs
  std::map<std::string, MemberCard> admitting_;      // by token
  std::set<std::string> answered_;                   // tokens, until their claims have ended
  bool over_ = false;                                // the world, and nothing of it is there
  bool another_world_reported_ = false;
  bool failure_reported_ = false;

  std::atomic<bool> without_thread_reported_{false};

  base::Mutex mutex_;
  base::CondVar changed_;
  std::weak_ptr<Agent> agent_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t changes_ STITCH_GUARDED_BY(mutex_) = 0;
  std::vector<Decided> decided_ STITCH_GUARDED_BY(mutex_);
  bool ending_ STITCH_GUARDED_BY(mutex_) = false;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;  // the record is gone, or cannot be reached
  bool stopped_ STITCH_GUARDED_BY(mutex_) = false;
  bool begins_ STITCH_GUARDED_BY(mutex_);  // with the claim
  std::thread thread_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
