#include "stitch/transport/gpu/lane.h"

#include <algorithm>
#include <utility>

#include "stitch/base/signals.h"
#include "stitch/transport/gpu/own_thread.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::chrono::microseconds kSpin(50);
constexpr std::chrono::microseconds kFirstBackOff(20);
constexpr std::chrono::microseconds kMaxBackOff(500);
constexpr std::chrono::seconds kStopTimeout(5);

// What a device that does not come to an end may still write to. Never freed.
void leak(std::vector<Lane::Watch> watches) {
  if (watches.empty()) return;
  static base::Mutex mutex;
  static auto& leaked = *new std::vector<std::vector<Lane::Watch>>();
  const base::MutexLock lock(mutex);
  leaked.push_back(std::move(watches));
}

}  // namespace

Lane::Lane(const CudaApi& cuda, int device, KeptStreams& streams)
    : cuda_(cuda), device_(device), kept_streams_(streams), outgoing_(cuda), incoming_(cuda) {
  const base::SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

Lane::~Lane() {
  {
    const base::MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

void Lane::post(Task task) {
  const base::MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_one();
}

void Lane::add_pair(TransferOrder::Pair pair, TransferOrder::End end, std::uint64_t source,
                    Launcher launcher) {
  const base::MutexLock lock(mutex_);
  order_.add_pair(pair, end, source);
  launchers_.emplace(pair, std::move(launcher));
}

std::vector<std::uint64_t> Lane::drop_pair(TransferOrder::Pair pair) {
  Launcher launcher;  // destroyed without the lock
  const base::MutexLock lock(mutex_);
  if (const auto at = launchers_.find(pair); at != launchers_.end()) {
    launcher = std::move(at->second);
    launchers_.erase(at);
  }
  order_changed_ = true;
  changed_.notify_one();
  idle_.notify_all();
  moved_ = Clock::now();  // others have time until what the pair has launched is aborted
  return order_.drop_pair(pair);
}

Lane::Entered Lane::announce(TransferOrder::Pair pair, std::uint64_t number) {
  const base::MutexLock lock(mutex_);
  if (holders_ > 0) return {std::nullopt, true};
  return {order_.announce(pair, number, Clock::now())};
}

Lane::Entered Lane::accept(TransferOrder::Pair pair, std::uint64_t number, std::uint64_t clock) {
  const base::MutexLock lock(mutex_);
  if (holders_ > 0) return {std::nullopt, true};
  order_changed_ = true;
  changed_.notify_one();
  return {order_.accept(pair, number, clock)};
}

bool Lane::agree(TransferOrder::Pair pair, std::uint64_t number, std::uint64_t clock) {
  const base::MutexLock lock(mutex_);
  order_changed_ = true;
  changed_.notify_one();
  return order_.agree(pair, number, clock);
}

bool Lane::withdraw(TransferOrder::Pair pair, std::uint64_t number) {
  const base::MutexLock lock(mutex_);
  order_changed_ = true;
  changed_.notify_one();
  idle_.notify_all();
  return order_.withdraw(pair, number);
}

void Lane::finish(TransferOrder::Pair pair) {
  const base::MutexLock lock(mutex_);
  order_changed_ = true;
  changed_.notify_one();
  idle_.notify_all();
  moved_ = Clock::now();
  order_.finish(pair);
}

std::vector<TransferOrder::Pair> Lane::overdue(std::chrono::nanoseconds age) const {
  const base::MutexLock lock(mutex_);
  return order_.overdue(Clock::now() - age);
}

std::size_t Lane::pending() const {
  const base::MutexLock lock(mutex_);
  return order_.pending();
}

std::size_t Lane::launched() const {
  const base::MutexLock lock(mutex_);
  return order_.launched();
}

std::chrono::nanoseconds Lane::standing_still() const {
  const base::MutexLock lock(mutex_);
  return order_.launched() > 0 ? Clock::now() - moved_ : std::chrono::nanoseconds(0);
}

bool Lane::hold(Clock::time_point deadline) {
  const base::MutexLock lock(mutex_);
  ++holders_;
  const auto busy = [this]() STITCH_REQUIRES(mutex_) {
    return order_.pending() > 0 || order_.launched() > 0;
  };
  while (busy() && idle_.wait_until(mutex_, deadline)) {
  }
  if (!busy()) return true;
  --holders_;
  return false;
}

void Lane::release() {
  const base::MutexLock lock(mutex_);
  --holders_;
}

bool Lane::held() const {
  const base::MutexLock lock(mutex_);
  return holders_ > 0;
}

void Lane::watch(Watch watch) { watches_.push_back(std::move(watch)); }

void* Lane::sink() {
  if (sink_ != nullptr) return sink_;
  const cuda::Status status = cuda_.malloc(&sink_, kSinkBytes);
  if (status != cuda::kSuccess) {
    sink_ = nullptr;
    (void)error_of(status, "no memory for what has no place to go");
  }
  return sink_;
}

// --- the thread ---

void Lane::set_up() {
  cuda::Status status = begin_own_thread(cuda_, device_);
  const std::optional<KeptStreams::Streams> kept =
      status == cuda::kSuccess ? kept_streams_.take(device_) : std::nullopt;
  if (kept) {
    streams_ = *kept;
    return;
  }
  int least = 0;
  int greatest = 0;
  if (status == cuda::kSuccess) status = cuda_.device_get_stream_priority_range(&least, &greatest);
  for (cuda::Stream& stream : streams_) {
    if (status != cuda::kSuccess) break;
    status = cuda_.stream_create_with_priority(&stream, cuda::kStreamNonBlocking, greatest);
  }
  if (status == cuda::kSuccess) return;
  failure_ = error_of(status, "streams cannot be created");
  lost_ = true;
}

void Lane::tear_down() {
  if (issuing_) watches_.push_back(std::move(issuing_));
  issuing_ = nullptr;
  const bool hangs = !watches_.empty();
  leak(std::move(watches_));
  watches_.clear();
  // What hangs may still use all of it, and to free memory would wait for the device.
  if (hangs) return;
  for (const cuda::Event event : free_events_) (void)cuda_.event_destroy(event);
  const bool all = std::count(streams_.begin(), streams_.end(), nullptr) == 0;
  if (all && !failure_) kept_streams_.keep(device_, streams_);
  if (sink_ != nullptr) (void)cuda_.free(sink_);
  outgoing_.free_memory();
  incoming_.free_memory();
}

// What they own may be device memory, which is given back where the device is current.
void Lane::drop_tasks() {
  std::vector<Task> tasks;
  do {
    tasks.clear();
    const base::MutexLock lock(mutex_);
    tasks.swap(tasks_);
  } while (!tasks.empty());
}

void Lane::run() noexcept {
  set_up();
  Clock::time_point last_progress = Clock::now();
  std::chrono::nanoseconds back_off = kFirstBackOff;
  std::optional<Clock::time_point> stop_deadline;
  while (true) {
    bool progress = run_tasks();
    progress = poll() || progress;
    progress = launch() || progress;
    if (progress) {
      last_progress = Clock::now();
      back_off = kFirstBackOff;
      continue;
    }
    {
      const base::MutexLock lock(mutex_);
      if (stopping_ && tasks_.empty()) {
        if (watches_.empty() && !issuing_) break;
        if (!stop_deadline) stop_deadline = Clock::now() + kStopTimeout;
        if (Clock::now() >= *stop_deadline) break;
      }
    }
    wait_for_work(last_progress, back_off);
  }
  tear_down();
  drop_tasks();
}

bool Lane::run_tasks() {
  std::vector<Task> tasks;
  {
    const base::MutexLock lock(mutex_);
    tasks.swap(tasks_);
    order_changed_ = false;  // launch() follows
  }
  for (Task& task : tasks) task();
  return !tasks.empty();
}

// Watches add others while they run, so each is out of the list meanwhile.
bool Lane::poll() {
  bool progress = false;
  for (std::size_t i = 0; i < watches_.size();) {
    Watch watch = std::move(watches_[i]);
    if (watch()) {
      progress = true;
      watches_[i] = std::move(watches_.back());
      watches_.pop_back();
    } else {
      watches_[i] = std::move(watch);
      ++i;
    }
  }
  return progress;
}

bool Lane::launch() {
  bool progress = false;
  while (true) {
    if (issuing_) {
      if (!issuing_()) return progress;
      issuing_ = nullptr;
      progress = true;
    }
    std::uint64_t number = 0;
    Launcher launcher;
    {
      const base::MutexLock lock(mutex_);
      const auto next = order_.launch();
      if (!next) return progress;
      if (order_.launched() == 1) moved_ = Clock::now();
      number = next->key.number;
      launcher = launchers_.at(next->pair);
    }
    progress = true;
    issuing_ = launcher(number);
  }
}

void Lane::wait_for_work(Clock::time_point last_progress, std::chrono::nanoseconds& back_off) {
  const Clock::time_point now = Clock::now();
  const bool watching = !watches_.empty() || issuing_;
  if (watching && now - last_progress < kSpin) return;
  const base::MutexLock lock(mutex_);
  const auto work = [this, watching]() STITCH_REQUIRES(mutex_) {
    return !tasks_.empty() || order_changed_ || (stopping_ && !watching);
  };
  if (!watching) {
    while (!work()) changed_.wait(mutex_);
    return;
  }
  const Clock::time_point deadline = now + back_off;
  while (!work() && changed_.wait_until(mutex_, deadline)) {
  }
  back_off = std::min<std::chrono::nanoseconds>(2 * back_off, kMaxBackOff);
}

}  // namespace stitch::transport::gpu
