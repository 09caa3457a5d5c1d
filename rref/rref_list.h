#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "stitch/rpc/message/worker_info.h"

namespace stitch {

class Worker;

// How far an object, or this worker's hold on it, has come. rref/lifetime/PROTOCOL.md has the
// rules.
enum class RRefState : std::uint8_t {
  pending,      // owned here: being created, or known from references only
  ready,        // owned here
  failed,       // owned here: its creation failed
  creating,     // of another worker: asked for, not answered yet
  borrowed,     // of another worker: in use on the word of a sender
  registering,  // of another worker: about to be counted by the owner
  registered,   // of another worker: the owner counts this worker as a holder
  lost,         // of another worker: its owner is gone
};
// "pending", "ready", ...
[[nodiscard]] std::string_view to_string(RRefState state) noexcept;

// One object that a worker owns, or that it refers to.
struct RRefInfo {
  std::string id;      // as RRef::describe()
  WorkerInfo owner;    // the worker that has the object; without a name if it is not known
  WorkerInfo creator;  // the worker that made the object or asked for it
  RRefState state = RRefState::lost;  // as this worker sees it
  // The function or class whose result the object is; for one made by make_rref(), the called
  // function that ran on that thread. Empty if it is not known here: there was none, or it was
  // received from another worker.
  std::string made_by;
  std::string type;  // of the object; empty where it is not known
  std::optional<std::size_t>
      bytes;  // when it was made: of tensors, texts, numbers and vectors
              // of tensors or numbers; of other types and other workers' objects unknown
  std::chrono::nanoseconds age{0};  // since this worker has known of it
  std::vector<WorkerInfo> holders;  // owned here: the other workers that hold it
  std::uint32_t local = 0;          // handles, and messages being handled, of this worker
  std::uint32_t in_messages = 0;    // messages sent that carry it and are not settled
};
// One line: id, state, type, bytes, age, holders.
std::ostream& operator<<(std::ostream& out, const RRefInfo& info);

// All objects that the worker owns for references, and all of others that it refers to, the oldest
// first. A picture of one moment, for people and tests; takes time for each reference. Throws
// Error(shutting_down) after shutdown. Any thread.
[[nodiscard]] std::vector<RRefInfo> rrefs(const Worker& worker);
// The same of the current worker.
[[nodiscard]] std::vector<RRefInfo> rrefs();

}  // namespace stitch
