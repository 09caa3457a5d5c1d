#include "stitch/rpc/gpu/gate_watch.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <list>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/transport/gpu/gpu_libraries.h"

namespace stitch::rpc {

namespace {

using Clock = std::chrono::steady_clock;

// While gates are closed the thread asks without a pause for kSpin, then with pauses that double.
constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::microseconds kFirstPause{10};
constexpr std::chrono::microseconds kLongestPause{500};

struct Item {
  std::unique_ptr<DeviceGate> gate;
  GateWatch::Then next;
};

// As transport::gpu::begin_own_thread(), on a device that this process uses. False when it uses
// none yet: then there is nothing to wait for either.
bool begin_thread() noexcept {
  const std::uint64_t used = devices_in_use.load(std::memory_order_acquire);
  if (used == 0) return false;
  try {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(std::countr_zero(used)));
    c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
    const transport::gpu::CudaApi* const cuda = transport::gpu::GpuLibraries::of_process().cuda();
    if (cuda != nullptr &&
        begin_own_thread(*cuda, device.index()) != transport::gpu::cuda::kSuccess)
      static_cast<void>(cuda->get_last_error());
  } catch (const std::exception&) {
    // What asks the device later says what is wrong with it.
  }
  return true;
}

Error stopped_error() {
  return Error(ErrorCode::shutting_down, "the worker is shutting down: it waits for no device");
}

void finish(Item item, const std::optional<Error>& error) noexcept {
  item.gate.reset();
  const base::CallbackScope callback;
  item.next(error);
}

}  // namespace

struct GateWatch::State {
  const std::string name;
  base::Mutex mutex;
  base::CondVar changed;
  std::list<Item> inbox STITCH_GUARDED_BY(mutex);
  bool started STITCH_GUARDED_BY(mutex) = false;
  bool stopped STITCH_GUARDED_BY(mutex) = false;
  bool ended STITCH_GUARDED_BY(mutex) = false;
  std::atomic<std::size_t> waiting{0};
  std::list<Item> active;  // the thread's alone
  bool begun = false;      // likewise

  explicit State(std::string thread_name) : name(std::move(thread_name)) {}

  // Leaves the count when what it sets off has been counted elsewhere, if it is to be.
  void finish_one(Item item, const std::optional<Error>& error) noexcept {
    finish(std::move(item), error);
    waiting.fetch_sub(1);
  }
  // What is due of the active items is done. False when nothing was.
  bool advance() {
    if (!begun && !active.empty()) begun = begin_thread();
    bool some = false;
    for (auto at = active.begin(); at != active.end();) {
      std::optional<Error> error;
      bool due = true;
      try {
        due = !at->gate || at->gate->open();
      } catch (const Error& failed) {
        error = failed;
      }
      if (!due) {
        ++at;
        continue;
      }
      Item item = std::move(*at);
      at = active.erase(at);
      finish_one(std::move(item), error);
      some = true;
    }
    return some;
  }
  void start_thread(const std::shared_ptr<State>& self) STITCH_REQUIRES(mutex);
  // False, and it stays the caller's, once stopped.
  bool add(const std::shared_ptr<State>& self, Item& item) STITCH_EXCLUDES(mutex);
  // Takes what is new; waits for that while `pause` lasts. False when the watch was stopped.
  bool take_new(std::optional<std::chrono::microseconds> pause) STITCH_EXCLUDES(mutex) {
    base::MutexLock lock(mutex);
    const auto until = pause ? Clock::now() + *pause : Clock::time_point::max();
    while (inbox.empty() && !stopped && (!pause || pause->count() > 0)) {
      if (!changed.wait_until(mutex, until)) break;
    }
    active.splice(active.end(), inbox);
    return !stopped;
  }
  void run() STITCH_EXCLUDES(mutex) {
    auto busy_until = Clock::now();
    std::chrono::microseconds pause{0};
    for (;;) {
      const std::size_t known = active.size();
      if (!take_new(active.empty() ? std::nullopt : std::optional(pause))) break;
      const bool more = active.size() != known;
      if (advance() || more) {
        busy_until = Clock::now() + kSpin;
        pause = std::chrono::microseconds(0);
      } else if (Clock::now() >= busy_until) {
        pause = std::clamp(pause * 2, kFirstPause, kLongestPause);
      }
    }
    for (auto& item : active) finish_one(std::move(item), stopped_error());
    active.clear();
    base::MutexLock lock(mutex);
    ended = true;
    changed.notify_all();
  }
};

GateWatch::GateWatch(std::string thread_name)
    : state_(std::make_shared<State>(std::move(thread_name))) {}

GateWatch::~GateWatch() { static_cast<void>(stop(Clock::now())); }

void GateWatch::State::start_thread(const std::shared_ptr<State>& self) {
  if (started) return;
  try {
    std::thread thread([self] {
      pthread_setname_np(pthread_self(), self->name.substr(0, 15).c_str());
      self->run();
    });
    thread.detach();  // stop() waits for its end
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::overloaded,
                std::string("a thread that waits for devices cannot be started: ") + error.what());
  }
  started = true;
}

bool GateWatch::State::add(const std::shared_ptr<State>& self, Item& item) {
  std::list<Item> one(1);
  base::MutexLock lock(mutex);
  if (stopped) return false;
  start_thread(self);
  one.front() = std::move(item);
  waiting.fetch_add(1);
  inbox.splice(inbox.end(), one);
  changed.notify_all();
  return true;
}

void GateWatch::start() {
  base::MutexLock lock(state_->mutex);
  if (!state_->stopped) state_->start_thread(state_);
}

void GateWatch::then(std::unique_ptr<DeviceGate> gate, Then next) {
  Item item{std::move(gate), std::move(next)};
  std::optional<Error> why = stopped_error();
  try {
    if (state_->add(state_, item)) return;
  } catch (const Error& no_thread) {
    why = no_thread;
  }
  finish(std::move(item), why);
}

bool GateWatch::stop(std::chrono::steady_clock::time_point deadline) {
  base::MutexLock lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
  while (state_->started && !state_->ended) {
    if (!state_->changed.wait_until(state_->mutex, deadline)) return state_->ended;
  }
  return true;
}

std::size_t GateWatch::waiting() const { return state_->waiting.load(); }

}  // namespace stitch::rpc
