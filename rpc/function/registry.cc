#include "stitch/rpc/function/registry.h"

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
  function.default_id = function.id;
  function.default_name = function.name;
  if (!functions_.contains(function.id) && !aliases_.contains(function.id)) {
    auto& slot = functions_[function.id];
    slot = std::make_unique<Function>(std::move(function));
    known = slot.get();
    return *slot;
  }
  clashes_.push_back(function.name);
  refused_.push_back(std::make_unique<Function>(std::move(function)));
  known = refused_.back().get();
  return *known;
}

void FunctionRegistry::add_alias(std::uint64_t id, const std::string& name,
                                 const Function& function) {
  const auto found = functions_.find(id);
  const auto [alias, is_new] = aliases_.try_emplace(id, Alias{name, &function});
  if ((found != functions_.end() && found->second.get() != &function) ||
      alias->second.function != &function)
    clashes_.push_back(name);
}

void FunctionRegistry::export_function(const Function& function) {
  MutexLock lock(mutex_);
  const auto found = functions_.find(function.id);
  if (found == functions_.end() || found->second.get() != &function)
    return;  // refused: check() reports it
  if (function.id == function.default_id) {
    found->second->name_wanted = true;
  } else {
    add_alias(function.default_id, function.default_name, function);
  }
}

void FunctionRegistry::export_as(const Function& function, const std::string& name) {
  MutexLock lock(mutex_);
  const auto id = function_id(name);
  if (id == function.id) return;
  std::unique_ptr<Function> moved;
  const auto refused = std::find_if(refused_.begin(), refused_.end(),
                                    [&](const auto& each) { return each.get() == &function; });
  if (refused != refused_.end()) {
    // The cure that check() names: it gives up the name that another has.
    const auto clash = std::find(clashes_.begin(), clashes_.end(), function.name);
    if (clash != clashes_.end()) clashes_.erase(clash);
    moved = std::move(*refused);
    refused_.erase(refused);
  } else {
    const auto found = functions_.find(function.id);
    moved = std::move(found->second);
    functions_.erase(found);
  }
  if (moved->name_wanted) add_alias(moved->id, moved->name, *moved);
  moved->id = id;
  moved->name = name;
  moved->name_wanted = true;
  const auto alias = aliases_.find(id);
  if (functions_.contains(id) ||
      (alias != aliases_.end() && alias->second.function != moved.get())) {
    clashes_.push_back(name);
    refused_.push_back(std::move(moved));
  } else {
    aliases_.erase(id);  // its own
    functions_[id] = std::move(moved);
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
  if (found != functions_.end()) return found->second.get();
  const auto alias = aliases_.find(id);
  return alias == aliases_.end() ? nullptr : alias->second.function;
}

std::vector<std::string> FunctionRegistry::names() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  names.reserve(functions_.size());
  for (const auto& [id, function] : functions_) names.push_back(function->name);
  for (const auto& [id, alias] : aliases_) names.push_back(alias.name);
  return names;
}

void FunctionRegistry::check() const {
  MutexLock lock(mutex_);
  if (clashes_.empty()) return;
  throw Error(ErrorCode::invalid_argument,
              "two different functions are registered under the name \"" + clashes_.front() +
                  "\"; rename one, or give one a name of its own with STITCH_EXPORT_AS");
}

namespace {

// Up to `most`; more than that where it is more.
std::size_t edit_distance(const std::string& a, const std::string& b, std::size_t most) {
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) > most) return most + 1;
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

[[nodiscard]] std::string without_scope(const std::string& name) {
  const auto at = name.rfind("::", name.find('<'));  // not those of template arguments
  return at == std::string::npos ? name : name.substr(at + 2);
}

}  // namespace

std::vector<std::string> nearest_names(const std::string& wanted, std::vector<std::string> names,
                                       std::size_t most) {
  std::vector<std::pair<std::size_t, std::string>> ranked;
  const std::size_t near = std::max<std::size_t>(2, wanted.size() / 2);
  const std::string bare_wanted = without_scope(wanted);
  for (auto& name : names) {
    std::size_t distance = edit_distance(wanted, name, near);
    // The right name in the wrong namespace, or without one.
    const std::size_t bare =
        edit_distance(bare_wanted, without_scope(name), bare_wanted.size() / 4);
    if (bare <= bare_wanted.size() / 4) distance = std::min(distance, bare + 1);
    if (distance <= near) ranked.emplace_back(distance, std::move(name));
  }
  std::sort(ranked.begin(), ranked.end());
  if (ranked.size() > most) ranked.resize(most);
  std::vector<std::string> nearest;
  for (auto& [distance, name] : ranked) nearest.push_back(std::move(name));
  return nearest;
}

}  // namespace stitch
