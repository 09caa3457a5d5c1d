// The poller's sources: which there are, which of them are visited each round, and what the kernel
// says of them.
#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/transport/stream/poller.h"

namespace stitch::transport {

void Poller::changed(SourceId id) noexcept {
  try {
    changes_.push_back(id);
  } catch (const std::bad_alloc&) {
    changes_lost_ = true;
  }
  any_changes_.store(true);
}

void Poller::add(SourceId id, int fd, std::shared_ptr<PollSource> source) {
  const bool cheap = source->cheap() || source->passive();
  {
    base::MutexLock lock(mutex_);
    const auto added =
        watched_.emplace(id, Watched{fd, false, false, true, std::move(source)}).first;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    if (epoll_ctl(sockets_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      const int error = errno;
      watched_.erase(added);
      throw Error(ErrorCode::internal, std::string("epoll_ctl failed: ") + std::strerror(error));
    }
    if (!cheap) expensive_.fetch_add(1);
    changed(id);
  }
  nudge();
}

void Poller::update_epoll(const Watched& watched, SourceId id) {
  epoll_event event{};
  // The end of what is not read is of interest all the same.
  event.events = (watched.paused ? std::uint32_t{EPOLLRDHUP} : std::uint32_t{EPOLLIN}) |
                 (watched.room ? std::uint32_t{EPOLLOUT} : 0);
  event.data.u64 = id;
  epoll_ctl(sockets_.get(), EPOLL_CTL_MOD, watched.fd, &event);
}

void Poller::watch_room(SourceId id, bool watch) {
  base::MutexLock lock(mutex_);
  const auto found = watched_.find(id);
  if (found == watched_.end() || found->second.room == watch) return;
  found->second.room = watch;
  update_epoll(found->second, id);
}

void Poller::pause(SourceId id, bool paused) {
  base::MutexLock lock(mutex_);
  const auto found = watched_.find(id);
  if (found == watched_.end() || found->second.paused == paused) return;
  found->second.paused = paused;
  update_epoll(found->second, id);
}

// The thread that polls clears awake_ first and looks at the changes then, before it sleeps: one of
// the two sees what the other one did.
void Poller::poll_soon(SourceId id) noexcept {
  {
    base::MutexLock lock(mutex_);
    const auto found = watched_.find(id);
    if (found == watched_.end()) return;
    if (!found->second.changed) {
      changed(id);
      found->second.changed = true;
    }
  }
  if (!awake_.load()) nudge();
}

void Poller::remove(SourceId id) noexcept {
  std::shared_ptr<PollSource> source;  // dropped without the lock
  {
    base::MutexLock lock(mutex_);
    const auto found = watched_.find(id);
    if (found == watched_.end()) return;
    source = std::move(found->second.source);
    epoll_ctl(sockets_.get(), EPOLL_CTL_DEL, found->second.fd, nullptr);
    watched_.erase(found);
    if (!source->cheap() && !source->passive()) expensive_.fetch_sub(1);
    changed(id);
  }
  nudge();  // the thread lets go of it, too
}

void Poller::take_up_changes() noexcept {
  try {
    for (;;) {
      for (; !changes_taken_.empty(); changes_taken_.pop_back()) take_up(changes_taken_.back());
      bool look_at_all = false;
      {
        base::MutexLock lock(mutex_);
        look_at_all = std::exchange(changes_lost_, false);
        if (changes_.empty() && !look_at_all) {
          any_changes_.store(false);
          return;
        }
        changes_taken_.swap(changes_);
        for (const SourceId id : changes_taken_) {
          const auto found = watched_.find(id);
          if (found != watched_.end()) found->second.changed = false;
        }
        // Those that were lost are marked, too, and would not be entered again.
        if (look_at_all) {
          for (auto& [id, watched] : watched_) watched.changed = false;
        }
      }
      if (look_at_all) take_up_all();
    }
  } catch (const std::bad_alloc&) {
    base::MutexLock lock(mutex_);
    changes_lost_ = true;
  }
}

void Poller::take_up(SourceId id) {
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

void Poller::take_up_all() {
  std::vector<SourceId> all;
  for (const auto& [id, polled] : polled_) all.push_back(id);
  {
    base::MutexLock lock(mutex_);
    for (const auto& [id, watched] : watched_) all.push_back(id);
  }
  for (const SourceId id : all) take_up(id);
}

void Poller::activate(Polled& polled) {
  if (polled.at || polled.passive) return;
  active_.push_back(&polled);
  polled.at = active_.size() - 1;
  if (awake_) polled.source->wake();
}

void Poller::deactivate(Polled& polled) noexcept {
  if (!polled.at) return;
  active_[*polled.at] = active_.back();
  active_[*polled.at]->at = polled.at;
  active_.pop_back();
  polled.at.reset();
}

bool Poller::source_ready(Polled& polled, std::uint32_t events) noexcept {
  try {
    return polled.source->ready(events);
  } catch (...) {
    remove(polled.id);
    return true;
  }
}

bool Poller::take_events(int timeout_ms) {
  std::array<epoll_event, 32> events;
  const int count =
      epoll_wait(sockets_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    const epoll_event event = events[static_cast<std::size_t>(i)];
    const SourceId id = event.data.u64;  // a copy: the kernel's struct is packed
    refresh();                           // an earlier one may have removed this one
    const auto found = polled_.find(id);
    if (found == polled_.end()) continue;
    Polled& polled = found->second;
    try {
      activate(polled);
    } catch (const std::bad_alloc&) {
      continue;  // the kernel reports it again
    }
    const bool source_moved = source_ready(polled, event.events);
    after_delivery();
    if (!source_moved) continue;
    moved = true;
    polled.last_moved = Clock::now();
  }
  return moved;
}

}  // namespace stitch::transport
