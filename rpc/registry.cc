#include "stitch/rpc/registry.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace stitch {

FunctionRegistry& FunctionRegistry::instance() {
  // Never destroyed: functions may still be looked up while other static objects go.
  static auto* const registry = new FunctionRegistry;
  return *registry;
}

const Function& FunctionRegistry::add(Function function) {
  MutexLock lock(mutex_);
  // By identity first: the function may have been renamed meanwhile.
  auto& known = by_identity_[function.identity];
  if (known != nullptr) return *known;
  auto& slot = functions_[function.id];
  if (slot == nullptr) {
    slot = std::make_unique<Function>(std::move(function));
    known = slot.get();
    return *slot;
  }
  refused_.push_back(std::make_unique<Function>(std::move(function)));
  known = refused_.back().get();
  return *known;
}

void FunctionRegistry::rename(const Function& function, const std::string& name) {
  MutexLock lock(mutex_);
  const auto found = functions_.find(function.id);
  if (found == functions_.end() || found->second.get() != &function) return;  // refused: check() reports it
  auto moved = std::move(found->second);
  functions_.erase(found);
  moved->id = function_id(name);
  moved->name = name;
  auto& slot = functions_[moved->id];
  if (slot == nullptr) {
    slot = std::move(moved);
  } else {
    refused_.push_back(std::move(moved));
  }
}

void FunctionRegistry::mark_inline(const Function& function) {
  MutexLock lock(mutex_);
  const auto found = functions_.find(function.id);
  if (found != functions_.end()) found->second->run_inline = true;
}

const Function* FunctionRegistry::find(std::uint64_t id) const {
  MutexLock lock(mutex_);
  const auto found = functions_.find(id);
  return found == functions_.end() ? nullptr : found->second.get();
}

std::vector<std::string> FunctionRegistry::names() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  names.reserve(functions_.size());
  for (const auto& [id, function] : functions_) names.push_back(function->name);
  return names;
}

void FunctionRegistry::check() const {
  MutexLock lock(mutex_);
  if (refused_.empty()) return;
  const Function& refused = *refused_.front();
  throw Error(ErrorCode::invalid_argument, "two different functions are registered under the name \"" + refused.name +
                                               "\"; rename one, or give one a name of its own with STITCH_EXPORT_AS");
}

namespace {

std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, change}));
    }
  }
  return row.back();
}

}  // namespace

std::vector<std::string> nearest_names(const std::string& wanted, std::vector<std::string> names, std::size_t most) {
  std::vector<std::pair<std::size_t, std::string>> ranked;
  for (auto& name : names) {
    const std::size_t distance = edit_distance(wanted, name);
    if (distance <= std::max<std::size_t>(2, wanted.size() / 2)) ranked.emplace_back(distance, std::move(name));
  }
  std::sort(ranked.begin(), ranked.end());
  if (ranked.size() > most) ranked.resize(most);
  std::vector<std::string> nearest;
  for (auto& [distance, name] : ranked) nearest.push_back(std::move(name));
  return nearest;
}

}  // namespace stitch
