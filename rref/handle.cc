#include "stitch/rref/handle.h"

#include <utility>

#include "stitch/rref/rref_agent.h"

namespace stitch::rref {

Handle::Handle(std::shared_ptr<RRefAgent> rrefs) : rrefs_(std::move(rrefs)) {}

const WorkerInfo& Handle::owner() const { return rrefs_->known_info_of(id_.owner); }

Handle::~Handle() {
  if (owns_) rrefs_->perform(rrefs_->lifetime().drop_local(id_));
}

bool Handle::is_owner() const noexcept { return id_.owner == rrefs_->lifetime().self(); }

bool Handle::confirmed_by_owner() const { return rrefs_->lifetime().status(id_).confirmed; }

}  // namespace stitch::rref
