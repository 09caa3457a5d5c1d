#include "stitch/rpc/function/registry.h"

#include <utility>

#include "stitch/base/error.h"

namespace stitch::rpc {

namespace {

// Counts changes of the registry. A change is counted under its lock, before it is made; find()
// reads the count under the lock, too, so what a thread remembers with it is as old as the count.
std::atomic<std::uint64_t> registry_changes{1};

// What this thread has looked up last: threads that serve calls mostly look up the same again.
struct LastFound {
  std::uint64_t changes = 0;
  std::uint64_t id = 0;
  const Function* function = nullptr;
};
constinit thread_local LastFound last_found;

}  // namespace

std::uint64_t function_id(std::string_view name) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash == 0 ? 1 : hash;
}

// "stitch::rpc::FunctionTag<&(ps::embed(at::Tensor))>" -> "ps::embed"; a lambda keeps its place:
// "main::{lambda(int)#1}".
std::string function_display_name(const std::type_info& tag) {
  std::string name = base::demangle(tag.name());
  const auto open = name.find("FunctionTag<");
  if (open == std::string::npos || name.back() != '>') return name;
  name = name.substr(open + 12, name.size() - open - 13);
  while (!name.empty() && name.back() == ' ') name.pop_back();
  if (name.starts_with("&(") && name.back() == ')') name = name.substr(2, name.size() - 3);
  if (name.starts_with("&")) name = name.substr(1);
  if (name.ends_with("{}")) name.resize(name.size() - 2);
  if (name.find("{lambda(") != std::string::npos || name.find("'lambda") != std::string::npos)
    return name;
  // Drop the parameter list: the first '(' outside template brackets; "(anonymous namespace)" is
  // not one.
  int depth = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0 && name.compare(i, 21, "(anonymous namespace)") != 0) {
      name.resize(i);
      break;
    }
  }
  // A template's instance starts with its return type: "int twice<int>".
  depth = 0;
  std::size_t start = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<' || name[i] == '(') ++depth;
    if (name[i] == '>' || name[i] == ')') --depth;
    if (name[i] == ' ' && depth == 0) start = i + 1;
  }
  return name.substr(start);
}

FunctionRegistry& FunctionRegistry::instance() {
  // Never destroyed: functions may still be looked up while other static objects go.
  static auto* const registry = new FunctionRegistry;
  return *registry;
}

const Function& FunctionRegistry::add(Function function) {
  base::MutexLock lock(mutex_);
  registry_changes.fetch_add(1, std::memory_order_relaxed);
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
  base::MutexLock lock(mutex_);
  registry_changes.fetch_add(1, std::memory_order_relaxed);
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
  base::MutexLock lock(mutex_);
  registry_changes.fetch_add(1, std::memory_order_relaxed);
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

void FunctionRegistry::mark_inline(const Function& function, bool before_serving) {
  base::MutexLock lock(mutex_);
  const auto found = functions_.find(function.id);
  if (found == functions_.end()) return;
  found->second->run_inline = true;
  found->second->before_serving = before_serving;
}

const Function* FunctionRegistry::find(std::uint64_t id) const {
  // A thread that has been told of a change by another one sees its count, too.
  if (last_found.id == id && last_found.changes == registry_changes.load(std::memory_order_acquire))
    return last_found.function;
  base::MutexLock lock(mutex_);
  const Function* function = nullptr;
  const auto found = functions_.find(id);
  if (found != functions_.end()) {
    function = found->second.get();
  } else if (const auto alias = aliases_.find(id); alias != aliases_.end()) {
    function = alias->second.function;
  }
  // Not what is missing: a peer may ask for anything.
  if (function != nullptr)
    last_found = {registry_changes.load(std::memory_order_relaxed), id, function};
  return function;
}

std::vector<std::string> FunctionRegistry::names() const {
  base::MutexLock lock(mutex_);
  std::vector<std::string> names;
  names.reserve(functions_.size());
  for (const auto& [id, function] : functions_) names.push_back(function->name);
  for (const auto& [id, alias] : aliases_) names.push_back(alias.name);
  return names;
}

void FunctionRegistry::check() const {
  base::MutexLock lock(mutex_);
  if (clashes_.empty()) return;
  throw Error(ErrorCode::invalid_argument,
              "two different functions are registered under the name \"" + clashes_.front() +
                  "\"; rename one, or give one a name of its own with STITCH_EXPORT_AS");
}

}  // namespace stitch::rpc
