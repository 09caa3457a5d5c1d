#include "stitch/rpc/agent/dump_thread.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/forked.h"
#include "stitch/base/signals.h"
#include "stitch/base/thread_id.h"
#include "stitch/rpc/agent/agent.h"

namespace stitch::rpc {

namespace {

constexpr std::array<int, 5> kFatalSignals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr unsigned char kTask = 0;  // the byte for posted tasks; others are signal numbers

// What the handlers use.
std::atomic<int> write_end{-1};
std::atomic<std::uint32_t> fork_of_pipe{0};
std::atomic<int> dump_thread{0};
std::atomic<bool> fatal_dumped{false};

void send(unsigned char byte) noexcept {
  const int fd = write_end.load(std::memory_order_acquire);
  // A forked child has the parent's end closed, or one of another file by that number.
  if (fd < 0 || fork_of_pipe.load(std::memory_order_acquire) != base::fork_count()) return;
  [[maybe_unused]] const ssize_t written = ::write(fd, &byte, 1);
}

void on_signal(int signal) {
  const int saved = errno;
  send(static_cast<unsigned char>(signal));
  errno = saved;
}

// The faulting instruction runs again once this returns, and abort() raises again: both end the
// process then.
void on_fatal_signal(int signal) {
  if (::gettid() != dump_thread.load(std::memory_order_acquire)) {
    send(static_cast<unsigned char>(signal));
    constexpr int kStep = 5;
    for (int waited = 0; waited < DumpThread::kFatalWaitMilliseconds && !fatal_dumped.load();
         waited += kStep) {
      const timespec step{0, kStep * 1'000'000};
      ::nanosleep(&step, nullptr);
    }
  }
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
  ::raise(signal);  // for one that another process has sent
}

// Takes a signal whose action is the default. False if it is the program's own.
bool take_signal(int signal, void (*handler)(int)) {
  struct sigaction before {};
  if (::sigaction(signal, nullptr, &before) != 0) return false;
  const bool siginfo = (before.sa_flags & SA_SIGINFO) != 0;
  if (!siginfo && before.sa_handler == handler) return true;
  if (siginfo || before.sa_handler != SIG_DFL) return false;
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | SA_ONSTACK;  // the stack may be what has failed
  ::sigemptyset(&action.sa_mask);
  return ::sigaction(signal, &action, nullptr) == 0;
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

bool DumpThread::take_file(const std::string& name) {
  base::MutexLock lock(mutex_);
  return files_.insert(name).second;
}

void DumpThread::give_back_file(std::string_view name) noexcept {
  base::MutexLock lock(mutex_);
  if (const auto found = files_.find(name); found != files_.end()) files_.erase(found);
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
  for (const int signal : kFatalSignals) static_cast<void>(take_signal(signal, &on_fatal_signal));
  if (!take_signal(SIGUSR1, &on_signal)) {
    std::fprintf(stderr,
                 "stitch: SIGUSR1 writes no dumps, because this program handles or ignores it: "
                 "call Worker::dump() instead\n");
  }
}

void DumpThread::run() {
  pthread_setname_np(pthread_self(), "stitch-dumps");
  dump_thread.store(base::this_thread_id(), std::memory_order_release);
  for (;;) {
    unsigned char byte = kTask;
    const ssize_t got = ::read(read_end_, &byte, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    if (byte != kTask) {
      dump_all(byte);
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

void DumpThread::dump_all(int signal) {
  std::vector<std::shared_ptr<Agent>> agents;
  {
    base::MutexLock lock(mutex_);
    for (const Record& each : agents_) {
      if (auto agent = each.agent.lock()) agents.push_back(std::move(agent));
    }
  }
  const bool fatal = signal != SIGUSR1;
  const char* const name = ::sigabbrev_np(signal);
  const std::string reason = std::string(fatal ? "fatal signal " : "signal ") + "SIG" +
                             (name == nullptr ? std::to_string(signal) : std::string(name));
  for (const auto& agent : agents) agent->dumps().write_quietly(reason);
  if (fatal) fatal_dumped.store(true);
}

}  // namespace stitch::rpc
