#pragma once

#include <memory>

#include "stitch/rpc/message/worker_info.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

class RRefAgent;

// What the copies of one RRef in a process share: one local reference of the lifetime protocol,
// dropped with the last copy. Copying is an atomic increment and nothing else. May outlive its
// worker; it is lost then. Thread contract: constant after own(); any thread may drop the last
// copy.
class Handle {
 public:
  // Without a reference yet: own() follows, or it drops none.
  explicit Handle(std::shared_ptr<RRefAgent> rrefs);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  // Takes over one local reference to `id`. Made first, it is there when the reference is.
  void own(const RRefId& id) noexcept {
    id_ = id;
    owns_ = true;
  }

  [[nodiscard]] const RRefId& id() const noexcept { return id_; }
  // Lives as long as this.
  [[nodiscard]] const WorkerInfo& owner() const;
  [[nodiscard]] bool is_owner() const noexcept;
  // The owner is known to know of the object.
  [[nodiscard]] bool confirmed_by_owner() const;
  // For this layer: the worker that the handle belongs to.
  [[nodiscard]] const std::shared_ptr<RRefAgent>& rrefs() const noexcept { return rrefs_; }

 private:
  const std::shared_ptr<RRefAgent> rrefs_;
  RRefId id_;
  bool owns_ = false;
};
using HandlePtr = std::shared_ptr<const Handle>;

}  // namespace stitch::rref
