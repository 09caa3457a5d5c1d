#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstddef>
#include <utility>
#include <vector>

#include "stitch/base/descriptor.h"
#include "stitch/base/mutex.h"

namespace stitch::transport {

// A few descriptors that an endpoint holds back from accepted connections, so that it can connect
// to its peers itself when strangers hold all others. Owned by an endpoint. Thread contract: any
// thread; no lock is held between calls.
class DescriptorReserve {
 public:
  // What `make` returns. When the process has no descriptor left, one of the reserve is closed for
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
  // Likewise for accepted connections: empty, with errno EMFILE, while the reserve is not whole.
  template <class Make>
  [[nodiscard]] base::Descriptor take_for_others(Make make) STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    if (whole()) return make();
    errno = EMFILE;
    return base::Descriptor();
  }
  // Makes one more descriptor available, for a call that cannot be repeated: when the process has
  // none left, one of the reserve is closed.
  void make_room() STITCH_EXCLUDES(mutex_) {
    static_cast<void>(take([] { return base::Descriptor(::eventfd(0, EFD_CLOEXEC)); }));
  }
  // Opens the missing descriptors, as far as the process has any left.
  void fill() STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    static_cast<void>(whole());
  }

  // Descriptors held back: a connection being made needs two at a time.
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
