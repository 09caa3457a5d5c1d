// The threads of a poller.
#include <pthread.h>

#include <string>
#include <system_error>
#include <thread>

#include "stitch/base/error.h"
#include "stitch/transport/stream/poller.h"

namespace stitch::transport {

namespace {
// One may be busy with deferred work; the other one polls meanwhile.
constexpr int kThreads = 2;
// Characters of a thread's name; the system allows 15.
constexpr std::size_t kMaxThreadName = 15;
}  // namespace

std::shared_ptr<Poller> Poller::start(const std::string& thread_name, CoreDemand& demand) {
  auto poller = std::make_shared<Poller>(demand);
  for (int i = 0; i < kThreads; ++i) {
    {
      base::MutexLock lock(poller->mutex_);
      ++poller->threads_;
    }
    try {
      std::thread([poller, name = thread_name.substr(0, kMaxThreadName)] {
        pthread_setname_np(pthread_self(), name.c_str());
        poller->run();
        base::MutexLock lock(poller->mutex_);
        --poller->threads_;
        poller->thread_changed_.notify_all();
      }).detach();
    } catch (const std::system_error& error) {
      {
        base::MutexLock lock(poller->mutex_);
        --poller->threads_;
      }
      poller->join();
      throw Error(ErrorCode::overloaded,
                  "the threads of an endpoint cannot be started: " + error.code().message());
    }
  }
  return poller;
}

}  // namespace stitch::transport
