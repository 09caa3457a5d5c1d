#include "stitch/transport/gpu/lane.h"

#include <algorithm>
#include <utility>

#include "stitch/base/signals.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::chrono::microseconds kSpin(50);
constexpr std::chrono::microseconds kFirstBackOff(20);
constexpr std::chrono::microseconds kMaxBackOff(500);
constexpr std::chrono::seconds kStopTimeout(5);

// Keeps the watches of a device that hangs, with the memory that it may still write to.
void leak(std::vector<Lane::Watch> watches) {
  if (watches.empty()) return;
  static base::Mutex mutex;
  static auto& leaked = *new std::vector<std::vector<Lane::Watch>>();
  const base::MutexLock lock(mutex);
  leaked.push_back(std::move(watches));
}

// cudaErrorStreamCapture...: a capture forbids the call, for as long as it lasts.
bool is_of_capture(cuda::Status status) {
  constexpr int kFirst = 900;
  constexpr int kLast = 908;
  return static_cast<int>(status) >= kFirst && static_cast<int>(status) <= kLast;
}

}  // namespace

std::optional<StreamPool::Streams> StreamPool::take(int device) {
  const base::MutexLock lock(mutex_);
  std::vector<Streams>& pooled = by_device_[device];
  if (pooled.empty()) return std::nullopt;
  const Streams streams = pooled.back();
  pooled.pop_back();
  return streams;
}

void StreamPool::give_back(int device, const Streams& streams) {
  const base::MutexLock lock(mutex_);
  by_device_[device].push_back(streams);
}

Lane::Lane(const CudaApi& cuda, int device, StreamPool& streams)
    : cuda_(cuda),
      device_(device),
      stream_pool_(streams),
      order_([this] { wake(); }),
      outgoing_(cuda),
      incoming_(cuda) {
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

// Also called under the lock of the order.
void Lane::wake() {
  const base::MutexLock lock(mutex_);
  order_changed_ = true;
  changed_.notify_one();
}

void Lane::watch(Watch watch) { watches_.push_back(std::move(watch)); }

void* Lane::sink() {
  if (sink_ != nullptr) return sink_;
  if (cuda_.malloc(&sink_, kSinkBytes) == cuda::kSuccess) return sink_;
  find_failure();
  return sink_ = nullptr;
}

// --- work on the device ---

cuda::Status Lane::query(cuda::Event event) {
  const cuda::Status status = cuda_.event_query(event);
  // kNotReady, too, becomes the last error of the thread, which other code would take for its own.
  if (status != cuda::kSuccess) (void)cuda_.get_last_error();
  return status;
}

void Lane::when_done(cuda::Stream stream, base::UniqueFunction<void(cuda::Status)> then) {
  Mark mark{stream};
  record(mark);
  watch([this, mark, then = std::move(then)]() mutable {
    const std::optional<cuda::Status> status = check(mark);
    if (!status) return false;
    if (mark.event != nullptr) free_events_.push_back(mark.event);
    then(*status);
    return true;
  });
}

void Lane::record(Mark& mark) {
  cuda::Status status = cuda::kSuccess;
  if (mark.event == nullptr && !free_events_.empty()) {
    mark.event = free_events_.back();
    free_events_.pop_back();
  }
  if (mark.event == nullptr)
    status = cuda_.event_create_with_flags(&mark.event, cuda::kEventDisableTiming);
  if (status == cuda::kSuccess) status = cuda_.event_record(mark.event, mark.stream);
  mark.recorded = status == cuda::kSuccess;
  if (!mark.recorded) find_failure();
}

// A call that fails says nothing of the work, which may still use memory: the memory is freed only
// when the work is seen to have ended, if need be by another call.
std::optional<cuda::Status> Lane::check(Mark& mark) {
  if (mark.recorded) {
    const cuda::Status status = query(mark.event);
    if (status == cuda::kSuccess) return status;
    if (status == cuda::kNotReady) return std::nullopt;
    mark.recorded = false;
  }
  find_failure();
  if (failure_) return cuda::kLaunchFailure;
  const cuda::Status status = cuda_.stream_query(mark.stream);
  if (status == cuda::kSuccess) return status;
  (void)cuda_.get_last_error();
  record(mark);  // later than before: it covers more, and not less
  if (status == cuda::kNotReady || is_of_capture(status) || mark.recorded) return std::nullopt;
  if (++mark.failures < kMaxFailures) return std::nullopt;
  lost(status);
  return status;
}

Error Lane::error_of(cuda::Status status, const std::string& what) {
  find_failure();
  return Error(status == cuda::kOutOfMemory ? ErrorCode::overloaded : ErrorCode::internal,
               "device " + std::to_string(device_) + ": " + what + ": " +
                   cuda_.get_error_name(status) + ", " + cuda_.get_error_string(status));
}

// The last error of a thread says nothing of the device: only a call to the driver asks it.
void Lane::find_failure() {
  (void)cuda_.get_last_error();
  if (failure_ || streams_[0] == nullptr) return;
  const cuda::Status status = cuda_.stream_query(streams_[0]);
  if (status == cuda::kSuccess) return;
  (void)cuda_.get_last_error();
  if (status != cuda::kNotReady && !is_of_capture(status)) lost(status);
}

void Lane::lost(cuda::Status status) {
  failure_.emplace(ErrorCode::internal, "device " + std::to_string(device_) +
                                            " is lost to this process until it is restarted: " +
                                            cuda_.get_error_name(status) + ", " +
                                            cuda_.get_error_string(status));
  lost_ = true;
}

// --- the thread ---

void Lane::set_up() {
  cuda::Status status = begin_own_thread(cuda_, device_);
  const std::optional<StreamPool::Streams> pooled =
      status == cuda::kSuccess ? stream_pool_.take(device_) : std::nullopt;
  if (pooled) {
    streams_ = *pooled;
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
  // A device that hangs may still use its memory, and a call that frees memory would wait for it.
  if (hangs) return;
  for (const cuda::Event event : free_events_) (void)cuda_.event_destroy(event);
  const bool all = std::count(streams_.begin(), streams_.end(), nullptr) == 0;
  if (all && !failure_) stream_pool_.give_back(device_, streams_);
  if (sink_ != nullptr) (void)cuda_.free(sink_);
  outgoing_.free_memory();
  incoming_.free_memory();
}

// Tasks may own device memory, which is freed on a thread where the device is current.
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
    const auto next = order_.next();
    if (!next) return progress;
    const auto& [launcher, number] = *next;
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
