#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "stitch/rpc/message/worker_info.h"
#include "stitch/rpc/options/options.h"
#include "stitch/rpc/world/world_record.h"
#include "stitch/transport/store/store.h"

namespace stitch::rpc {

// How a worker that starts finds the world that runs already, if one does, and its place in it. A
// record in the store proves nothing: its world may have been killed. So the worker rings (counts a
// key up), and the keeper of a world that lives answers within moments; when none does within
// kAnswerTimeout and no member can be reached, the world is dead and its record is taken away (the
// keeper alone may have died, unnoticed by the others). Lives within join_world(). Thread
// contract: one thread. Methods throw Error(timeout) once the deadline has passed, and what the
// store throws.
class RunningWorld {
 public:
  // The keeper may have died, and the next one be known only after a verdict.
  static constexpr std::chrono::milliseconds kAnswerTimeout{4000};

  // In which the record of a world comes back to a store whose host's process has ended and come
  // back: the others notice that at once, and their keeper within 1.5 s that the store is served.
  static constexpr std::chrono::milliseconds kReturnTime{3000};

  // The references outlive this object.
  RunningWorld(const Options& options, transport::Store& store,
               std::chrono::steady_clock::time_point deadline,
               std::chrono::milliseconds answer_timeout = kAnswerTimeout);

  // A TCP store that has just been opened by a new host is empty, though the world of the former
  // host may run: waits until its keeper has had the time to find the store (kReturnTime, at most
  // half of what is left until the deadline). Elastic worlds only: a fixed one cannot be founded
  // while its workers are in another.
  void await_former_world(bool hosts);
  // Whether the store has the record of a world, living or dead. Quick.
  [[nodiscard]] bool is_recorded();
  // What finds out about a world whose keeper does not answer, by its other members. Either may be
  // null: false.
  struct Reach {
    using Function = std::function<bool(const WorldRecord& silent)>;
    Function join;   // makes this worker a member; false: no member can be reached
    Function lives;  // whether a member can be reached
  };
  // The record of the living world; nothing if there is none. Of a silent world, `join` is called
  // where this worker has a place in it, else `lives`: then the next keeper is waited for, which
  // knows whether there is a place now. Throws Error(invalid_argument) when this worker has no
  // place in it: its size is another, it has other members or is full.
  [[nodiscard]] std::optional<WorldRecord> find(const Reach& reach = {});
  // This worker's name, id and epoch there: those of its name if the world has seen it, with a
  // higher epoch, else an id that no other worker has. Throws Error(already_exists) when its rank
  // is another's, Error(invalid_argument) when no id is left.
  [[nodiscard]] WorkerInfo claim(const WorldRecord& record);
  // No member of the world could be reached: takes its record away, unless it has changed.
  void bury(const WorldRecord& record);

  // The next epoch of a worker name in this store, which is above `former`.
  static std::uint64_t next_epoch(transport::Store& store, const std::string& name,
                                  std::uint64_t former);

 private:
  [[nodiscard]] bool answers();
  void check_time() const;
  void check_place(const WorldRecord& record) const;
  [[nodiscard]] bool has_place(const WorldRecord& record) const;
  [[nodiscard]] WorkerId claim_id(const WorldRecord& record, std::string& name);
  [[nodiscard]] bool claim_this(const WorldRecord& record, WorkerId id, const std::string& name,
                                std::string* owner);

  const Options& options_;
  transport::Store& store_;
  const std::chrono::steady_clock::time_point deadline_;
  const std::chrono::milliseconds answer_timeout_;
};

}  // namespace stitch::rpc
