#include "stitch/rpc/agent/dump_thread.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/forked.h"
#include "stitch/base/signals.h"
#include "stitch/rpc/agent/agent.h"

namespace stitch::rpc {

namespace {

enum : unsigned char { kTask, kSignal };  // what a byte says

// What the handler uses.
std::atomic<int> write_end{-1};
std::atomic<std::uint32_t> fork_of_pipe{0};

void send(unsigned char byte) noexcept {
  const int fd = write_end.load(std::memory_order_acquire);
  // A forked child has the parent's end closed, or one of another file by that number.
  if (fd < 0 || fork_of_pipe.load(std::memory_order_acquire) != base::fork_count()) return;
  [[maybe_unused]] const ssize_t written = ::write(fd, &byte, 1);
}

void on_signal(int) {
  const int saved = errno;
  send(kSignal);
  errno = saved;
}

// False if the program handles or ignores the signal.
bool take_signal() {
  struct sigaction before {};
  if (::sigaction(SIGUSR1, nullptr, &before) != 0) return false;
  const bool siginfo = (before.sa_flags & SA_SIGINFO) != 0;
  if (!siginfo && before.sa_handler == &on_signal) return true;
  if (siginfo || before.sa_handler != SIG_DFL) return false;
  struct sigaction action {};
  action.sa_handler = &on_signal;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  return ::sigaction(SIGUSR1, &action, nullptr) == 0;
}

}  // namespace

DumpThread& DumpThread::of_this_process() {
  static std::atomic<DumpThread*> current{new DumpThread(base::fork_count())};
  DumpThread* known = current.load();
  while (known->fork_ != base::fork_count()) {
    auto* const fresh = new DumpThread(base::fork_count());
    if (current.compare_exchange_strong(known, fresh)) return *fresh;
    delete fresh;
  }
  return *known;
}

void DumpThread::add(const std::shared_ptr<Agent>& agent) {
  base::MutexLock lock(mutex_);
  if (!started_) start();
  agents_.push_back({agent.get(), agent});
}

void DumpThread::remove(const Agent* agent) {
  base::MutexLock lock(mutex_);
  std::erase_if(agents_, [agent](const Record& each) { return each.address == agent; });
}

void DumpThread::post(base::UniqueFunction<void()> task) {
  {
    base::MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  send(kTask);
}

std::uint64_t DumpThread::next_number() noexcept {
  static std::atomic<std::uint64_t> last(static_cast<std::uint64_t>(::time(nullptr)));
  return ++last;
}

void DumpThread::start() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(ErrorCode::overloaded,
                "a pipe for dumps cannot be made: " + base::errno_text(errno));
  }
  ::fcntl(ends[1], F_SETFL, O_NONBLOCK);  // a full pipe has dumps due already
  for (const int fd : ends) base::close_in_children(fd);
  read_end_ = ends[0];
  write_end.store(ends[1], std::memory_order_release);
  fork_of_pipe.store(base::fork_count(), std::memory_order_release);
  {
    const base::SignalsBlocked blocked;  // the thread inherits it
    std::thread([this] { run(); }).detach();
  }
  started_ = true;
  if (!take_signal()) {
    std::fprintf(stderr,
                 "stitch: SIGUSR1 writes no dumps, because this program handles or ignores it: "
                 "call Worker::dump() instead\n");
  }
}

void DumpThread::run() {
  pthread_setname_np(pthread_self(), "stitch-dumps");
  for (;;) {
    unsigned char byte = kTask;
    const ssize_t got = ::read(read_end_, &byte, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    if (byte == kSignal) {
      dump_all();
      continue;
    }
    std::vector<base::UniqueFunction<void()>> tasks;
    {
      base::MutexLock lock(mutex_);
      tasks.swap(tasks_);
    }
    for (auto& task : tasks) task();
  }
}

void DumpThread::dump_all() {
  std::vector<std::shared_ptr<Agent>> agents;
  {
    base::MutexLock lock(mutex_);
    for (const Record& each : agents_) {
      if (auto agent = each.agent.lock()) agents.push_back(std::move(agent));
    }
  }
  for (const auto& agent : agents) agent->dumps().write_quietly("signal SIGUSR1");
}

}  // namespace stitch::rpc
