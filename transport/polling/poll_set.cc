// One file, though long: sources, and the descriptors that threads sleep on until they are ready.
#include "stitch/transport/polling/poll_set.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"

namespace stitch::transport {

namespace {

// Microseconds. A source that costs a system call stays active for this long after it last moved
// something: longer than a round trip between two hosts, so that an exchange keeps it active.
constexpr std::chrono::microseconds kActiveFor{500};
// No source has this id.
constexpr PollSet::SourceId kBell = 0;

void ring(const base::Descriptor& eventfd) noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(eventfd.get(), &one, sizeof(one)));
}

void clear(const base::Descriptor& eventfd) noexcept {
  std::uint64_t value = 0;
  static_cast<void>(!::read(eventfd.get(), &value, sizeof(value)));
}

[[nodiscard]] int checked(int result, const char* what) {
  if (result < 0)
    throw Error(ErrorCode::internal, std::string(what) + " failed: " + base::errno_text(errno));
  return result;
}

}  // namespace

PollSet::PollSet()
    : sockets_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      bell_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      wake_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
      sleeper_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kBell;
  static_cast<void>(
      checked(epoll_ctl(sockets_.get(), EPOLL_CTL_ADD, bell_.get(), &event), "epoll_ctl"));
  event = {};
  event.data.fd = sockets_.get();
  static_cast<void>(
      checked(epoll_ctl(sleeper_.get(), EPOLL_CTL_ADD, sockets_.get(), &event), "epoll_ctl"));
  event.events = EPOLLIN;
  event.data.fd = wake_.get();
  static_cast<void>(
      checked(epoll_ctl(sleeper_.get(), EPOLL_CTL_ADD, wake_.get(), &event), "epoll_ctl"));
}

void PollSet::changed(SourceId id) noexcept {
  changes_.push_back(id);
  any_changes_.store(true);
}

void PollSet::add(SourceId id, int fd, std::shared_ptr<PollSource> source) {
  const bool cheap = source->cheap() || source->passive();
  base::MutexLock lock(mutex_);
  const auto added = watched_.emplace(id, Watched{fd, false, false, true, std::move(source)}).first;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = id;
  if (epoll_ctl(sockets_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    const int error = errno;
    watched_.erase(added);
    throw Error(ErrorCode::internal, "epoll_ctl failed: " + base::errno_text(error));
  }
  if (!cheap) expensive_.fetch_add(1);
  changed(id);
}

void PollSet::update_epoll(const Watched& watched, SourceId id) {
  epoll_event event{};
  // A paused source is watched for the end of its stream all the same.
  event.events = (watched.paused ? std::uint32_t{EPOLLRDHUP} : std::uint32_t{EPOLLIN}) |
                 (watched.room ? std::uint32_t{EPOLLOUT} : 0);
  event.data.u64 = id;
  epoll_ctl(sockets_.get(), EPOLL_CTL_MOD, watched.fd, &event);
}

void PollSet::watch_room(SourceId id, bool watch) {
  base::MutexLock lock(mutex_);
  const auto found = watched_.find(id);
  if (found == watched_.end() || found->second.room == watch) return;
  found->second.room = watch;
  update_epoll(found->second, id);
}

void PollSet::pause(SourceId id, bool paused) {
  base::MutexLock lock(mutex_);
  const auto found = watched_.find(id);
  if (found == watched_.end() || found->second.paused == paused) return;
  found->second.paused = paused;
  update_epoll(found->second, id);
}

// (While a thread stands by, the next one that polls finds the change.)
// The thread that polls clears awake_ before it looks at the changes for the last time and sleeps;
// this one enters the change before it reads awake_: one of the two sees what the other one did.
bool PollSet::poll_soon(SourceId id) noexcept {
  {
    base::MutexLock lock(mutex_);
    const auto found = watched_.find(id);
    if (found == watched_.end()) return false;
    if (!found->second.changed) {
      changed(id);
      found->second.changed = true;
    }
  }
  return !awake_.load();
}

std::shared_ptr<PollSource> PollSet::remove(SourceId id) noexcept {
  base::MutexLock lock(mutex_);
  const auto found = watched_.find(id);
  if (found == watched_.end()) return nullptr;
  std::shared_ptr<PollSource> source = std::move(found->second.source);
  epoll_ctl(sockets_.get(), EPOLL_CTL_DEL, found->second.fd, nullptr);
  watched_.erase(found);
  if (!source->cheap() && !source->passive()) expensive_.fetch_sub(1);
  changed(id);
  return source;
}

void PollSet::take_up_changes() noexcept {
  for (;;) {
    for (; !changes_taken_.empty(); changes_taken_.pop_back()) take_up(changes_taken_.back());
    base::MutexLock lock(mutex_);
    if (changes_.empty()) {
      any_changes_.store(false);
      return;
    }
    changes_taken_.swap(changes_);
    for (const SourceId id : changes_taken_) {
      const auto found = watched_.find(id);
      if (found != watched_.end()) found->second.changed = false;
    }
  }
}

void PollSet::take_up(SourceId id) {
  std::shared_ptr<PollSource> source;
  {
    base::MutexLock lock(mutex_);
    const auto watched = watched_.find(id);
    if (watched != watched_.end()) source = watched->second.source;
  }
  const auto known = polled_.find(id);
  if (known != polled_.end() && known->second.source != source) {
    deactivate(known->second);
    polled_.erase(known);
  }
  if (!source) return;
  const bool cheap = source->cheap();
  const bool passive = source->passive();
  activate(
      polled_.try_emplace(id, Polled{id, std::move(source), cheap, passive, {}, {}}).first->second);
}

void PollSet::activate(Polled& polled) {
  if (polled.at || polled.passive) return;
  active_.push_back(&polled);
  polled.at = active_.size() - 1;
  if (awake_) polled.source->wake();
}

void PollSet::deactivate(Polled& polled) noexcept {
  if (!polled.at) return;
  active_[*polled.at] = active_.back();
  active_[*polled.at]->at = polled.at;
  active_.pop_back();
  polled.at.reset();
}

void PollSet::poll_after_delivery(std::shared_ptr<PollSource> source) noexcept {
  if (std::find(after_delivery_.begin(), after_delivery_.end(), source) == after_delivery_.end())
    after_delivery_.push_back(std::move(source));
}

void PollSet::poll_after_delivery_now() noexcept {
  while (!after_delivery_.empty()) {
    const auto source = std::move(after_delivery_.back());
    after_delivery_.pop_back();
    source->poll();
  }
}

bool PollSet::poll_once(bool ask_kernel_now) {
  refresh();
  after_delivery();  // requests of a thread in PollRole::reclaimed, which no delivery follows
  bool moved = false;
  bool any_expensive = false;
  Clock::time_point now{};
  for (std::size_t i = 0; i < active_.size();) {
    Polled& polled = *active_[i];
    if (!polled.cheap) {
      if (now == Clock::time_point{}) now = Clock::now();
      if (polled.source->blocked() ||
          (now - polled.last_moved > kActiveFor && !polled.source->pending())) {
        // From now on the kernel reports it, or poll_soon() is called for it. deactivate() moves
        // another source to its place.
        if (polled.source->sleep()) {
          deactivate(polled);
        } else {
          ++i;
        }
        continue;
      }
      any_expensive = true;
    }
    ++i;
    const bool source_moved = polled.source->poll();
    after_delivery();
    if (!source_moved) continue;
    moved = true;
    if (!polled.cheap) polled.last_moved = now;
  }
  // When no active source makes system calls, asking the kernel is the only system call of the
  // round. However busy some sources are, the others are looked at every kRoundsPerKernelLook.
  const bool kernel_only =
      !moved && !any_expensive && expensive_.load(std::memory_order_relaxed) > 0;
  slow_ = moved || any_expensive || kernel_only;
  rounds_since_kernel_ += slow_ ? kQuickRounds : 1;
  if (ask_kernel_now || kernel_only || rounds_since_kernel_ >= kRoundsPerKernelLook ||
      ask_kernel_soon_.load(std::memory_order_relaxed)) {
    rounds_since_kernel_ = 0;
    ask_kernel_soon_.store(false, std::memory_order_relaxed);
    if (ask_kernel()) moved = true;
  }
  return moved;
}

void PollSet::ask_kernel_next() { rounds_since_kernel_ = kRoundsPerKernelLook; }

bool PollSet::ask_kernel() {
  Events events;
  return call_ready(events,
                    epoll_wait(sockets_.get(), events.data(), static_cast<int>(events.size()), 0));
}

bool PollSet::call_ready(const Events& events, int count) {
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    const epoll_event event = events[static_cast<std::size_t>(i)];
    const SourceId id = event.data.u64;  // a copy: the kernel's struct is packed
    if (id == kBell) clear(bell_);
    refresh();  // an earlier one may have removed this one
    const auto found = polled_.find(id);
    if (found == polled_.end()) continue;
    Polled& polled = found->second;
    activate(polled);
    const bool source_moved = polled.source->ready(event.events);
    after_delivery();
    if (!source_moved) continue;
    moved = true;
    polled.last_moved = Clock::now();
  }
  return moved;
}

// `done` is not to ring when what is ready sets it.
bool PollSet::wait_with_role(base::AwaitedFlag& done, std::chrono::milliseconds limit) {
  if (!done.wake_through(bell_)) return false;
  Events events;
  const int count = epoll_wait(sockets_.get(), events.data(), static_cast<int>(events.size()),
                               static_cast<int>(limit.count()));
  const bool slept = count >= 0 || errno == EINTR;  // not in a forked child
  done.wake_no_more(bell_);
  wake_sources();
  call_ready(events, count);
  return slept;
}

void PollSet::wake_sources() {
  if (awake_.exchange(true)) return;
  for (Polled* const each : active_) each->source->wake();
}

bool PollSet::any_moving() const noexcept {
  return std::any_of(active_.begin(), active_.end(),
                     [](const Polled* each) { return each->source->moving(); });
}

bool PollSet::put_sources_to_sleep() {
  awake_.store(false);
  refresh();
  bool asleep = !any_changes_.load() && after_delivery_.empty();
  for (std::size_t i = 0; asleep && i < active_.size(); ++i) asleep = active_[i]->source->sleep();
  if (!asleep) wake_sources();
  return asleep;
}

// The lock keeps armed_ and the kernel alike: the thread that gave the role up arms while the next
// holder may already disarm. The first look needs none: a thread that finds its state while another
// changes it holds the role, and arms again later, or is about to poll.
void PollSet::arm(bool armed) {
  if (armed_.load() == armed) return;
  base::MutexLock lock(arm_mutex_);
  if (armed_.exchange(armed) == armed) return;
  epoll_event event{};
  event.events = armed ? EPOLLIN | EPOLLONESHOT : 0;
  event.data.fd = sockets_.get();
  epoll_ctl(sleeper_.get(), EPOLL_CTL_MOD, sockets_.get(), &event);
}

void PollSet::ring_bell() noexcept { ring(bell_); }

void PollSet::ring_doorbell() noexcept { ring(wake_); }

void PollSet::clear_doorbell() noexcept { clear(wake_); }

PollSet::WakeUp PollSet::wait() {
  std::array<epoll_event, 2> events;
  const int count = epoll_wait(sleeper_.get(), events.data(), static_cast<int>(events.size()), -1);
  WakeUp wake_up;
  for (int i = 0; i < count; ++i) {
    if (events[static_cast<std::size_t>(i)].data.fd == sockets_.get()) {
      armed_.store(false);
      wake_up.traffic = true;
    } else {
      wake_up.doorbell = true;
    }
  }
  return wake_up;
}

bool PollSet::wait_for_doorbell(std::chrono::nanoseconds limit) {
  pollfd doorbell{wake_.get(), POLLIN, 0};
  const timespec timeout{0, static_cast<long>(limit.count())};
  return ppoll(&doorbell, 1, &timeout, nullptr) > 0;
}

void PollSet::drop_polled(Dropped& into) {
  active_.clear();
  into.swap(polled_);
}

void PollSet::drop_watched() {
  std::unordered_map<SourceId, Watched> watched;  // destroyed without the lock
  base::MutexLock lock(mutex_);
  watched.swap(watched_);
}

}  // namespace stitch::transport
