#include "stitch/rpc/gpu/gate_watch.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "stitch/base/callback_scope.h"
#include "stitch/base/mutex.h"

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

Error stopped_error() {
  return Error(ErrorCode::shutting_down, "the worker is shutting down: it waits for no device");
}

void finish(Item item, const std::optional<Error>& error) noexcept {
  item.gate.reset();
  const base::CallbackScope callback;
  try {
    item.next(error);
  } catch (...) {
    // It must not throw: out of memory while reporting something, for example.
  }
}

}  // namespace

struct GateWatch::State {
  const std::string name;
  base::Mutex mutex;
  base::CondVar changed;
  std::vector<Item> inbox STITCH_GUARDED_BY(mutex);
  bool started STITCH_GUARDED_BY(mutex) = false;
  bool stopped STITCH_GUARDED_BY(mutex) = false;
  bool ended STITCH_GUARDED_BY(mutex) = false;
  std::atomic<std::size_t> waiting{0};
  std::vector<Item> active;  // the thread's alone

  explicit State(std::string thread_name) : name(std::move(thread_name)) {}

  // What is due of the active items is done. False when nothing was.
  bool advance() {
    std::vector<std::pair<Item, std::optional<Error>>> due;
    for (auto& item : active) {
      try {
        if (item.gate && !item.gate->open()) continue;
        due.emplace_back(std::move(item), std::nullopt);
      } catch (const Error& error) {
        due.emplace_back(std::move(item), error);
      }
    }
    std::erase_if(active, [](const Item& item) { return !item.next; });
    waiting.fetch_sub(due.size());
    for (auto& [item, error] : due) finish(std::move(item), error);
    return !due.empty();
  }
  // Takes what is new; waits for that while `pause` lasts. False when the watch was stopped.
  bool take_new(std::optional<std::chrono::microseconds> pause) STITCH_EXCLUDES(mutex) {
    base::MutexLock lock(mutex);
    const auto until = pause ? Clock::now() + *pause : Clock::time_point::max();
    while (inbox.empty() && !stopped && (!pause || pause->count() > 0)) {
      if (!changed.wait_until(mutex, until)) break;
    }
    for (auto& item : inbox) active.push_back(std::move(item));
    inbox.clear();
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
    waiting.fetch_sub(active.size());
    for (auto& item : std::exchange(active, {})) finish(std::move(item), stopped_error());
    base::MutexLock lock(mutex);
    ended = true;
    changed.notify_all();
  }
};

GateWatch::GateWatch(std::string thread_name)
    : state_(std::make_shared<State>(std::move(thread_name))) {}

GateWatch::~GateWatch() { static_cast<void>(stop(Clock::now())); }

void GateWatch::then(std::unique_ptr<DeviceGate> gate, Then next) {
  Item item{std::move(gate), std::move(next)};
  {
    base::MutexLock lock(state_->mutex);
    if (!state_->stopped) {
      if (!state_->started) {
        std::thread thread([state = state_] {
          pthread_setname_np(pthread_self(), state->name.substr(0, 15).c_str());
          state->run();
        });
        thread.detach();  // stop() waits for its end
        state_->started = true;
      }
      state_->waiting.fetch_add(1);
      state_->inbox.push_back(std::move(item));
      state_->changed.notify_all();
      return;
    }
  }
  finish(std::move(item), stopped_error());
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
