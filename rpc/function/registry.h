#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/function/function_traits.h"
#include "stitch/rpc/message/owned_object.h"

namespace stitch::rpc {

class IncomingCall;
// Why a call was not run, or was refused for its arguments: what a KeepResult gets instead of an
// exception of the user's function. Thrown by a function, it reaches the caller
// as it is.
class CallRefused : public Error {
 public:
  explicit CallRefused(const Error& error) : Error(error) {}
};
// Takes the result of a function that was asked to keep it: an object, or the exception it threw.
using KeepResult = base::UniqueFunction<void(OwnedObject value, std::exception_ptr exception)>;

// A function that peers may call. Constant after static initialisation.
struct Function {
  std::uint64_t id = 0;
  std::string name;              // for people
  std::uint64_t default_id = 0;  // without STITCH_EXPORT_AS
  std::string default_name{};
  bool name_wanted = false;        // STITCH_EXPORT or STITCH_EXPORT_AS named it so
  const void* identity = nullptr;  // differs between different functions
  const std::type_info* object_type =
      nullptr;                  // of the object a member function needs; null for a free function
  bool run_inline = false;      // on the reader thread, see STITCH_INLINE
  bool before_serving = false;  // also before Worker::serve()
  // Decodes the arguments, runs the function (on `object` for a member function) and answers the
  // call, now or later.
  void (*reply)(const std::shared_ptr<IncomingCall>& call, void* object) = nullptr;
  // As above, but gives the result to `sink` (exactly once) instead of sending it.
  void (*keep)(const std::shared_ptr<IncomingCall>& call, void* object, KeepResult sink) = nullptr;
};

// All functions of this program that may be called remotely, by wire id. Filled before main() by
// the templates that name functions; only what is in here can be called. Thread contract: any
// thread.
class FunctionRegistry {
 public:
  [[nodiscard]] static FunctionRegistry& instance();

  // Registers `function` and returns the stored one. A second, different function of that id is
  // remembered for check().
  const Function& add(Function function) STITCH_EXCLUDES(mutex_);
  // The function can be called by its default name, also when it has others.
  void export_function(const Function& function) STITCH_EXCLUDES(mutex_);
  // Gives a registered function another name and wire id, by which this program calls it from now
  // on. The name must be unique. Earlier names keep working.
  void export_as(const Function& function, const std::string& name) STITCH_EXCLUDES(mutex_);
  // `before_serving`: it is served also before Worker::serve().
  void mark_inline(const Function& function, bool before_serving = false) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] const Function* find(std::uint64_t id) const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::string> names() const STITCH_EXCLUDES(mutex_);
  // Throws Error(invalid_argument) when two different functions share a name. init() calls it.
  void check() const STITCH_EXCLUDES(mutex_);

 private:
  struct Alias {
    std::string name;
    const Function* function;
  };
  void add_alias(std::uint64_t id, const std::string& name, const Function& function)
      STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Function>> functions_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, Alias> aliases_
      STITCH_GUARDED_BY(mutex_);  // names that are not the latest
  std::unordered_map<const void*, const Function*> by_identity_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Function>> refused_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::string> clashes_ STITCH_GUARDED_BY(mutex_);  // names of two different functions
};

}  // namespace stitch::rpc
