#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "stitch/base/error.h"
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
// counter is one higher once a world has been recorded, or a worker has found out that this
// founding cannot be completed, so the next founding finds no old keys.
//
// A founder may die at any step, and only the store can tell. Founders that wait look for questions
// there (a counter) and answer them (a key for each slot). A founder that has not written what it
// must and does not answer is taken for dead. Then the founding is given up, and all that live meet
// again in the next generation; so does one that was only slow.
// 1. Who takes a slot writes its record at once. Without one after kRecordTime it is dead.
// 2. Of two founders with one name or rank, one may be a former life of the other. If each answers
//    within kAnswerTime, both live, and all workers get an error.
// 3. A worker that finds all slots taken, one of them under its own name or rank: as 2, unless that
//    founder is away: 4.
// 4. A founder that knows all others makes its endpoints, and later starts to serve. It does not
//    answer meanwhile, and says before that it is away: `silent_time`.
// Lives within join_world(). Thread contract: one thread. Every method throws Error(timeout) once
// the deadline has passed, and what the store throws.
class Rendezvous {
 public:
  // One request to the store, by hosts that start many processes.
  static constexpr std::chrono::milliseconds kRecordTime{3000};
  static constexpr std::chrono::milliseconds kAnswerTime{1000};
  // Endpoints are made in moments; a host that is overloaded takes seconds.
  static constexpr std::chrono::milliseconds kSilentTime{10'000};

  // `hosts`: the store ends with this worker. The references outlive this object.
  Rendezvous(const Options& options, transport::Store& store, bool hosts,
             std::chrono::steady_clock::time_point deadline,
             std::chrono::milliseconds silent_time = kSilentTime);

  struct Founder {
    WorkerId id;
    MemberRecord record;  // its name is the worker's, also where it came without one
  };
  // Begins a founding, or takes part in one: all founders, by id; `self` describes this worker.
  // Throws when they form no world; then the workers that have arrived are told. Nothing when the
  // founding has been given up, or `recorded` says, meanwhile, that the store has the record of a
  // world, where this worker may have a place. May be called again then.
  [[nodiscard]] std::optional<std::vector<Founder>> meet(MemberRecord self,
                                                         const std::function<bool()>& recorded);
  // This worker among them, with its new epoch: that of `unused` where it is of the same name.
  [[nodiscard]] WorkerInfo self(const std::optional<WorkerInfo>& unused = std::nullopt);
  // A random number that all workers of this world share.
  [[nodiscard]] std::uint64_t world_number();
  // The cards of all founders, by id. Nothing when the founding has been given up.
  [[nodiscard]] std::optional<std::vector<MemberCard>> exchange(const MemberCard& own);
  // After everything has been read and this worker serves: returns true once the world is recorded,
  // false when the founding has been given up.
  [[nodiscard]] bool finish(const WorldRecord& record);

 private:
  using Timeout = transport::Store::Timeout;
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kNoRank = Options::kFromLauncher;
  static constexpr std::size_t kMaxShown = 127;  // of a text from the store
  // For questions, and whether the founding has been given up.
  static constexpr Timeout kLookInterval{100};

  [[nodiscard]] std::string key(const std::string& name) const;
  [[nodiscard]] std::string slot_key(const char* name, std::int64_t slot) const;
  [[nodiscard]] std::int64_t count(const std::string& key);
  [[nodiscard]] Timeout left() const;
  [[nodiscard]] bool read_members(const MemberRecord& self, const std::function<bool()>& too_late);
  [[nodiscard]] bool in_time(const MemberRecord& self, const std::function<bool()>& too_late);
  [[nodiscard]] std::optional<std::string> await(const std::string& key, std::size_t slot,
                                                 const char* what);
  [[nodiscard]] bool record_world(const WorldRecord& record);
  void erase_keys();

  [[nodiscard]] bool is_superseded();
  [[nodiscard]] bool is_given_up();
  [[nodiscard]] bool has_failed() { return store_.try_get(key("failure")).has_value(); }
  void supersede();
  void tell_the_others(const Error* error);

  // rendezvous_liveness.cc
  [[nodiscard]] std::int64_t ask();
  void answer();
  void answer_if_due();
  void go_away();
  void come_back();
  [[nodiscard]] bool is_away(std::int64_t slot);
  [[nodiscard]] bool has_answered(std::int64_t slot, std::int64_t question);
  [[nodiscard]] bool all_have_answered(std::int64_t question);
  // It has not answered, and is not away.
  [[nodiscard]] bool is_silent(std::int64_t slot, std::int64_t question);
  [[nodiscard]] bool any_is_silent(std::int64_t question);
  [[nodiscard]] bool all_live(const std::set<std::int64_t>& slots);
  [[nodiscard]] bool former_life_is_silent(const MemberRecord& self, std::int64_t question);

  // rendezvous_checks.cc
  [[nodiscard]] MemberRecord decode(const std::string& text) const;
  void check_member(const MemberRecord& record) const;
  void assign_ids();
  void check(const std::vector<MemberRecord>& records) const;
  [[nodiscard]] std::optional<Error> find_objection();
  [[nodiscard]] bool stands(const Error& objection);
  [[nodiscard]] Error incomplete();
  [[nodiscard]] std::string init_timeout_text() const;
  [[nodiscard]] std::string arrived_names();
  [[nodiscard]] std::vector<MemberRecord> arrived_records();
  [[nodiscard]] static bool in_one_place(const MemberRecord& a, const MemberRecord& b);

  const Options& options_;
  transport::Store& store_;
  const bool hosts_;
  const Clock::time_point deadline_;
  const std::chrono::milliseconds silent_time_;
  const std::int64_t founders_;  // how many
  std::string silent_;           // the last founder that was taken for dead while it was waited for
  // Of the last founding that was given up since its records do not fit.
  std::vector<MemberRecord> objected_to_;

  // Of the present founding: from meet() on.
  std::int64_t generation_ = 0;
  std::int64_t slot_ = 0;
  std::int64_t answered_ = 0;                    // the last question that this worker has answered
  Clock::time_point last_look_{};                // for questions
  std::optional<Clock::time_point> superseded_;  // when that was noticed
  std::vector<MemberRecord> records_;            // by slot
  std::vector<WorkerId> ids_;                    // by slot
};

}  // namespace stitch::rpc
