#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "stitch/transport/polling/poller.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport {

// A source over an eventfd that counts the calls it gets.
class Source final : public PollSource {
 public:
  explicit Source(bool is_cheap = false) : cheap_(is_cheap) {}
  bool poll() override {
    polls.fetch_add(1);
    return on_poll && on_poll();
  }
  bool ready(std::uint32_t) override {
    std::uint64_t value = 0;
    const bool came = ::read(fd.get(), &value, sizeof(value)) == sizeof(value);
    if (came) signals.fetch_add(1);
    return came && (!on_ready || on_ready());
  }
  bool cheap() const noexcept override { return cheap_; }
  bool pending() const noexcept override {
    looks.fetch_add(1);
    return false;
  }
  bool sleep() override {
    looks.fetch_add(1);
    asleep = true;
    return !on_sleep || on_sleep();
  }
  void wake() override { asleep = false; }

  void signal() const {
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(fd.get(), &one, sizeof(one)), 8);
  }
  [[nodiscard]] bool wait_signals(int count) const {
    return wait_until([&] { return signals.load() >= count; }, std::chrono::seconds(10));
  }
  const base::Descriptor fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<int> polls{0};
  std::atomic<int> signals{0};
  mutable std::atomic<int> looks{0};  // how often it was asked whether it may sleep
  std::atomic<bool> asleep{false};
  // Set before it is added.
  std::function<bool()> on_poll;
  std::function<bool()> on_ready;
  std::function<bool()> on_sleep;

 private:
  const bool cheap_;
};

// A poller whose threads end with the test, also when that returns early.
struct Joined {
  CoreDemand demand;  // says always the same
  const std::shared_ptr<Poller> poller;
  explicit Joined(bool busy = false)
      : demand(busy ? []() noexcept { return std::optional(true); }
                    : []() noexcept { return std::optional(false); }),
        poller(Poller::start("test", demand)) {
    if (busy) lose_core();
  }
  // The cores are wanted for some milliseconds, if it says so.
  void lose_core() {
    for (int i = 0; i < 2; ++i) demand.lost_core(Poller::Clock::now());
  }
  ~Joined() { poller->join(); }
};

inline Poller::SourceId add(Poller& poller, const std::shared_ptr<Source>& source) {
  const auto id = poller.new_id();
  poller.add(id, source->fd.get(), source);
  return id;
}

}  // namespace stitch::transport
