#include "stitch/dist_autograd/context_table.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

namespace stitch::dist_autograd {

std::shared_ptr<ContextState> ContextTable::create() {
  base::MutexLock lock(mutex_);
  const ContextId id{self_, epoch_, next_++};
  auto context = std::make_shared<ContextState>(id);
  own_.insert(id.counter);
  contexts_.emplace(id, context);
  return context;
}

std::shared_ptr<ContextState> ContextTable::find(const ContextId& id) const {
  base::MutexLock lock(mutex_);
  const auto found = contexts_.find(id);
  return found == contexts_.end() ? nullptr : found->second;
}

std::shared_ptr<ContextState> ContextTable::find_or_join(const ContextId& id) {
  base::MutexLock lock(mutex_);
  return find_or_make(id);
}

std::shared_ptr<ContextState> ContextTable::find_or_join(const ContextId& id,
                                                         const WorkerInfo& teller) {
  base::MutexLock lock(mutex_);
  const auto released = ended_.find({{id.home, id.epoch}, {teller.id, teller.epoch}});
  if (released != ended_.end() && released->second.contains(id.counter)) return nullptr;
  if (contexts_.size() >= kMaxTold && !contexts_.contains(id)) {
    const auto told = std::count_if(contexts_.begin(), contexts_.end(), [&](const auto& each) {
      return each.second->told_by(teller.id, teller.epoch);
    });
    if (static_cast<std::size_t>(told) >= kMaxTold)
      throw Error(ErrorCode::overloaded, "this worker takes part in " + std::to_string(told) +
                                             " dist_autograd contexts that " + to_string(teller) +
                                             " has told it");
  }
  auto context = find_or_make(id);
  if (context) context->add_teller(teller.id, teller.epoch);
  return context;
}

std::shared_ptr<ContextState> ContextTable::find_or_make(const ContextId& id) {
  if (const auto found = contexts_.find(id); found != contexts_.end()) return found->second;
  if (closed_ || ended(id)) return nullptr;
  auto context = std::make_shared<ContextState>(id);
  contexts_.emplace(id, context);
  return context;
}

std::shared_ptr<ContextState> ContextTable::remove(const ContextId& id) {
  base::MutexLock lock(mutex_);
  if (own(id)) {
    own_.erase(id.counter);
  } else {
    ended_by_home(id.home, id.epoch).insert(id.counter);
  }
  const auto found = contexts_.find(id);
  if (found == contexts_.end()) return nullptr;
  auto context = std::move(found->second);
  contexts_.erase(found);
  return context;
}

std::shared_ptr<ContextState> ContextTable::remove_told_by(const ContextId& id,
                                                           const WorkerInfo& teller) {
  base::MutexLock lock(mutex_);
  ended_[{{id.home, id.epoch}, {teller.id, teller.epoch}}].insert(id.counter);
  const auto found = contexts_.find(id);
  if (found == contexts_.end() || !found->second->remove_teller(teller.id, teller.epoch))
    return nullptr;
  auto context = std::move(found->second);
  contexts_.erase(found);
  return context;
}

rref::IntervalSet& ContextTable::ended_by_home(WorkerId home, std::uint64_t epoch) {
  return ended_[{{home, epoch}, {home, epoch}}];
}

std::vector<std::shared_ptr<ContextState>> ContextTable::raise_low_water(WorkerId home,
                                                                         std::uint64_t epoch,
                                                                         std::uint64_t counter) {
  base::MutexLock lock(mutex_);
  return take_below(home, epoch, counter);
}

std::vector<std::shared_ptr<ContextState>> ContextTable::take_below(WorkerId home,
                                                                    std::uint64_t epoch,
                                                                    std::uint64_t counter) {
  std::vector<std::shared_ptr<ContextState>> taken;
  ended_by_home(home, epoch).insert_below(counter);
  const auto first = contexts_.lower_bound({home, epoch, 0});
  const auto last = contexts_.lower_bound({home, epoch, counter});
  taken.reserve(static_cast<std::size_t>(std::distance(first, last)));
  for (auto each = first; each != last; ++each) taken.push_back(std::move(each->second));
  contexts_.erase(first, last);
  return taken;
}

void ContextTable::add_ended(WorkerId home, std::uint64_t epoch, std::uint64_t first,
                             std::uint64_t last) {
  base::MutexLock lock(mutex_);
  ended_by_home(home, epoch).insert_run(first, last);
}

std::uint64_t ContextTable::low_water() const {
  base::MutexLock lock(mutex_);
  return own_.empty() ? next_ : *own_.begin();
}

std::uint64_t ContextTable::ended_from(std::uint64_t counter) const {
  base::MutexLock lock(mutex_);
  const auto next = own_.lower_bound(counter);
  return next == own_.begin() ? 0 : *std::prev(next) + 1;
}

std::vector<std::shared_ptr<ContextState>> ContextTable::remove_home(WorkerId home,
                                                                     std::uint64_t epoch) {
  base::MutexLock lock(mutex_);
  std::erase_if(ended_, [&](const auto& each) { return each.first.first == Life(home, epoch); });
  return take_below(home, epoch, std::numeric_limits<std::uint64_t>::max());
}

std::vector<std::shared_ptr<ContextState>> ContextTable::remove_all() {
  std::vector<std::shared_ptr<ContextState>> removed;
  base::MutexLock lock(mutex_);
  closed_ = true;
  for (auto& [id, context] : contexts_) removed.push_back(std::move(context));
  contexts_.clear();
  own_.clear();
  return removed;
}

std::vector<std::shared_ptr<ContextState>> ContextTable::all() const {
  base::MutexLock lock(mutex_);
  std::vector<std::shared_ptr<ContextState>> contexts;
  for (const auto& [id, context] : contexts_) contexts.push_back(context);
  return contexts;
}

std::size_t ContextTable::ended_remembered() const {
  base::MutexLock lock(mutex_);
  std::size_t count = 0;
  for (const auto& [lives, counters] : ended_) count += counters.runs();
  return count;
}

bool ContextTable::has_ended(const ContextId& id) const {
  base::MutexLock lock(mutex_);
  if (contexts_.contains(id)) return false;
  return closed_ || ended(id) || std::any_of(ended_.begin(), ended_.end(), [&](const auto& each) {
           return each.first.first == Life(id.home, id.epoch) && each.second.contains(id.counter);
         });
}

// REQUIRES: the context is not here.
bool ContextTable::ended(const ContextId& id) const {
  if (own(id)) return true;
  const Life home(id.home, id.epoch);
  const auto found = ended_.find({home, home});
  return found != ended_.end() && found->second.contains(id.counter);
}

}  // namespace stitch::dist_autograd
