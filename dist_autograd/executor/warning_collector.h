#pragma once

#include <c10/util/Exception.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/graph/compat.h"

namespace stitch::dist_autograd {

// For the type of c10::WarningHandler::process, whose parameters are those of one warning: they
// differ between versions of libtorch.
template <class Process>
class BasicWarningCollector;

// A handler of libtorch's warnings (TORCH_WARN) that keeps them, whichever threads raise them, for
// one thread: libtorch's own engine does the same for its threads. Thread contract: any thread.
template <class... Parts>
class BasicWarningCollector<void (c10::WarningHandler::*)(Parts...)> final
    : public c10::WarningHandler {
 public:
  void process(Parts... parts) override {
    base::MutexLock lock(mutex_);
    warnings_.emplace_back(parts...);
  }
  // Gives this thread's handler what has been collected, in order; each warning once. REQUIRES:
  // that handler is another one.
  void replay() STITCH_EXCLUDES(mutex_) {
    std::vector<Warning> all;
    {
      base::MutexLock lock(mutex_);
      all.swap(warnings_);
    }
    c10::WarningHandler& handler = *torch_warnings::get_warning_handler();
    for (const Warning& each : all)
      std::apply([&](const auto&... parts) { handler.process(parts...); }, each);
  }

 private:
  using Warning = std::tuple<std::remove_cvref_t<Parts>...>;
  base::Mutex mutex_;
  std::vector<Warning> warnings_ STITCH_GUARDED_BY(mutex_);
};

using WarningCollector = BasicWarningCollector<decltype(&c10::WarningHandler::process)>;

}  // namespace stitch::dist_autograd
