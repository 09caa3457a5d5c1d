#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "stitch/rpc/message/worker_info.h"

namespace stitch::dist_autograd {

// Which life of each other worker a pass deals with: the one that was present when it first did.
// The protocol of the pass knows workers by their ids only, which a successor has, too; so this
// tells whether the loss of a life is that of a worker of the pass, or of a predecessor. Thread
// contract: none, the pass guards it with its mutex.
class PassLives {
 public:
  // The pass sends to this life, gets a message of it, or hears that it takes part. Only the first
  // life of a worker counts: a pass that has lost it cannot go on with the next one.
  void note(const WorkerInfo& life) {
    if (!epoch_of(life.id)) lives_.push_back({life.id, life.epoch});
  }
  // Whether what has been lost is a former life: the pass deals with a later one of that worker.
  // `present`: the epoch of the one that is here now, with which the pass would deal if it has not
  // begun to.
  [[nodiscard]] bool is_former(const WorkerInfo& lost, std::uint64_t present) const {
    return lost.epoch < epoch_of(lost.id).value_or(present);
  }

 private:
  struct Life {
    WorkerId worker;
    std::uint64_t epoch;
  };
  [[nodiscard]] std::optional<std::uint64_t> epoch_of(WorkerId worker) const {
    const auto found = std::find_if(lives_.begin(), lives_.end(),
                                    [&](const Life& life) { return life.worker == worker; });
    return found == lives_.end() ? std::nullopt : std::optional(found->epoch);
  }
  std::vector<Life> lives_;  // few: a pass has messages with some workers
};

}  // namespace stitch::dist_autograd
