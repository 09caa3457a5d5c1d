#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "stitch/rpc/options/options.h"
#include "stitch/rpc/world/member_record.h"
#include "stitch/rpc/world/world_record.h"
#include "stitch/transport/store/store.h"

namespace stitch::rpc {

// How the workers that found a world find one another in a store. Each takes a slot (an atomic
// counter), writes its record under the slot and reads those of all founders, so every one sees a
// duplicate name or rank. Then each publishes its card and reads those of all. The one with the
// lowest id publishes the record of the world, and the last one to have read erases the other keys.
// A fixed world is founded by all its workers, an elastic one by the first `min` to arrive; who
// arrives later joins the running world. Keys of a founding have its generation in them: the
// counter is one higher once a world has been recorded, or a worker that took a slot has given it
// up, so the next founding finds no old keys.
// Lives within join_world(). Thread contract: one thread. Every method throws Error(timeout) once
// the deadline has passed, and what the store throws.
class Rendezvous {
 public:
  // `hosts`: the store ends with this worker. The references outlive this object.
  Rendezvous(const Options& options, transport::Store& store, bool hosts,
             std::chrono::steady_clock::time_point deadline);

  struct Founder {
    WorkerId id;
    MemberRecord record;  // its name is the worker's, also where it came without one
  };
  // All founders, by id; `self` describes this worker. Throws when they form no world; then the
  // workers that have arrived are told. Nothing when `recorded` says, meanwhile, that the store has
  // the record of a world, or another founding has begun: this worker may have a place in that.
  [[nodiscard]] std::optional<std::vector<Founder>> meet(MemberRecord self,
                                                         const std::function<bool()>& recorded);
  // This worker among them, with its new epoch: that of `unused` where it is of the same name.
  [[nodiscard]] WorkerInfo self(const std::optional<WorkerInfo>& unused = std::nullopt);
  // A random number that all workers of this world share.
  [[nodiscard]] std::uint64_t world_number();
  // The cards of all founders, by id.
  [[nodiscard]] std::vector<MemberCard> exchange(const MemberCard& own);
  // After everything has been read and this worker serves: returns once the world is recorded.
  void finish(const WorldRecord& record);

 private:
  using Timeout = transport::Store::Timeout;
  static constexpr std::int64_t kNoRank = Options::kFromLauncher;
  static constexpr std::size_t kMaxShown = 127;  // of a text from the store

  [[nodiscard]] std::string key(const std::string& name) const;
  [[nodiscard]] std::string slot_key(const char* name, std::int64_t slot) const;
  [[nodiscard]] std::optional<std::vector<std::string>> read_members(
      const std::function<bool()>& too_late);
  [[nodiscard]] bool in_time(const std::function<bool()>& too_late);
  [[nodiscard]] bool is_superseded();
  void supersede();
  void tell_the_others(const std::vector<MemberRecord>& records);
  [[nodiscard]] Timeout left() const;
  [[nodiscard]] std::string arrived_names();
  void check(const std::vector<MemberRecord>& records) const;
  void check_member(const MemberRecord& record) const;
  void assign_ids();
  void record_world(const WorldRecord& record);
  void erase_keys();
  // The value of a key that the founder of `slot` sets. Error(timeout) names it.
  [[nodiscard]] std::string await(const std::string& key, std::size_t slot, const char* what);

  const Options& options_;
  transport::Store& store_;
  const bool hosts_;
  const std::chrono::steady_clock::time_point deadline_;
  const std::int64_t founders_;  // how many
  std::int64_t generation_ = 0;  // from meet() on
  std::int64_t slot_ = 0;
  std::vector<MemberRecord> records_;  // by slot
  std::vector<WorkerId> ids_;          // by slot
};

}  // namespace stitch::rpc
