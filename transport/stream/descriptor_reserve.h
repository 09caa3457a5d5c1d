#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstddef>
#include <utility>
#include <vector>

#include "stitch/base/descriptor.h"
#include "stitch/base/mutex.h"

namespace stitch::transport {

// A few descriptors that an endpoint holds back from those who knock, so that it can connect to its
// peers itself when strangers have all others. Owned by an endpoint. Thread contract: any thread.
class DescriptorReserve {
 public:
  // What `make` makes. When the process has no descriptor left, one of the reserve makes room for
  // it. Empty, with errno, when `make` fails.
  template <class Make>
  [[nodiscard]] base::Descriptor take(Make make) STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    base::Descriptor made = make();
    while (!made && (errno == EMFILE || errno == ENFILE) && !spare_.empty()) {
      spare_.pop_back();
      made = make();
    }
    return made;
  }
  // Likewise for others: empty, with errno EMFILE, as long as the reserve is not whole.
  template <class Make>
  [[nodiscard]] base::Descriptor take_for_others(Make make) STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    if (whole()) return make();
    errno = EMFILE;
    return base::Descriptor();
  }
  // Sees to it that one more descriptor can be had, for a call that cannot be repeated: when the
  // process has none left, one of the reserve goes.
  void make_room() STITCH_EXCLUDES(mutex_) {
    static_cast<void>(take([] { return base::Descriptor(::eventfd(0, EFD_CLOEXEC)); }));
  }
  // Takes what is missing, as far as there is any.
  void fill() STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    static_cast<void>(whole());
  }

  static constexpr std::size_t kSpare = 8;

 private:
  [[nodiscard]] bool whole() STITCH_REQUIRES(mutex_) {
    while (spare_.size() < kSpare) {
      base::Descriptor spare(::eventfd(0, EFD_CLOEXEC));
      if (!spare) return false;
      spare_.push_back(std::move(spare));
    }
    return true;
  }

  base::Mutex mutex_;
  std::vector<base::Descriptor> spare_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
