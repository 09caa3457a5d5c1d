// The kernel of all simulations of protocols: what a history is, how it runs, and how tests run
// many. A simulator adds the world of its protocol, what goes wrong there, and what must hold.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/unique_function.h"
#include "tests/support/histories.h"

namespace stitch::simulation {

using Time = std::chrono::steady_clock::time_point;
using Duration = Time::duration;
using Task = base::UniqueFunction<void()>;

// Events by their times; those of one time in the order in which they were added.
template <class Event>
class Agenda {
 public:
  void add(Time when, Event event) {
    entries_.push_back({when, ++added_, std::move(event)});
    std::push_heap(entries_.begin(), entries_.end());
  }
  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
  [[nodiscard]] Time time() const { return entries_.front().when; }  // of the next event
  [[nodiscard]] const Event& next() const { return entries_.front().event; }
  [[nodiscard]] Event take() {
    std::pop_heap(entries_.begin(), entries_.end());
    Event event = std::move(entries_.back().event);
    entries_.pop_back();
    return event;
  }

 private:
  struct Entry {
    Time when;
    std::uint64_t number;
    Event event;
    bool operator<(const Entry& other) const {
      return when != other.when ? when > other.when : number > other.number;
    }
  };
  std::vector<Entry> entries_;  // a heap
  std::uint64_t added_ = 0;
};

// Messages that are on their way. A connection has one for each end and order that it keeps; a
// network without any order has one for all.
template <class Message>
class Channel : public std::deque<Message> {
 public:
  // Whichever comes next, where no order is kept.
  Message take(std::size_t index) {
    Message taken = std::move((*this)[index]);
    this->erase(this->begin() + static_cast<std::ptrdiff_t>(index));
    return taken;
  }
  // The first one that is `wanted`: it overtakes those before it.
  template <class Wanted>
  std::optional<Message> take_first(Wanted wanted) {
    const auto found = std::find_if(this->begin(), this->end(), wanted);
    if (found == this->end()) return std::nullopt;
    return take(static_cast<std::size_t>(found - this->begin()));
  }
  // The connection has broken: the first `kept` messages still arrive.
  void lose_after(std::size_t kept) {
    this->erase(this->begin() + static_cast<std::ptrdiff_t>(kept), this->end());
  }
  // When a message arrives that would be there at `when`, was it not for those before it.
  Time in_order(Time when) { return last_ = std::max(last_, when); }
  [[nodiscard]] Time last() const noexcept { return last_; }

 private:
  Time last_{};
};

// What has become of a history.
struct Outcome {
  std::string failure;  // the first rule that was broken; empty if none was
  std::map<std::string, std::uint64_t> counts;
  std::string trace;  // where the run was traced
};

// One history of a protocol. Everything in it follows from its number: dice, time and order. Not
// thread-safe.
class History {
 public:
  explicit History(std::uint64_t number) : random_(number) {}
  virtual ~History() = default;
  History(const History&) = delete;
  History& operator=(const History&) = delete;

  // Runs it, once. An exception breaks a rule, too.
  Outcome run();

  // ---- the dice
  // One of 0 to `count` - 1.
  template <std::integral T>
  [[nodiscard]] T pick(T count) {
    return std::uniform_int_distribution<T>(0, count - 1)(random_);
  }
  [[nodiscard]] bool one_in(int count) { return pick(count) == 0; }
  [[nodiscard]] bool chance(double p) { return std::bernoulli_distribution(p)(random_); }
  [[nodiscard]] double uniform(double from, double to) {
    return std::uniform_real_distribution<>(from, to)(random_);
  }
  [[nodiscard]] Duration up_to(Duration most) { return Duration(pick(most.count() + 1)); }

  // ---- the clock
  [[nodiscard]] Time now() const noexcept { return now_; }
  void at(Time when, Task task) { agenda_.add(when, std::move(task)); }
  void after(Duration delay, Task task) { at(now_ + delay, std::move(task)); }
  // Runs the next event; false when there is none, or a rule is broken.
  bool step();
  void run_until(Time end);
  // Does `step` until it returns false: nothing more happens. A rule is broken if that takes more
  // than `most` steps.
  template <class Step>
  void run_until_quiet(int most, Step step) {
    while (!failed() && step()) {
      if (most-- == 0) return fail("there is no end of events");
    }
  }

  // ---- what happened
  // The first time, with the text that the parts make.
  template <class... Parts>
  void fail(const Parts&... parts) {
    note("FAILS: ", parts...);
    if (failure_.empty()) failure_ = time_text() + text_of(parts...);
  }
  [[nodiscard]] bool failed() const noexcept { return !failure_.empty(); }
  void count(const char* what, std::uint64_t times = 1) { counts_[what] += times; }
  [[nodiscard]] std::uint64_t counted(const char* what) const {
    const auto found = counts_.find(what);
    return found == counts_.end() ? 0 : found->second;
  }
  // A line of the trace, which is kept only where a history is run once more for it.
  template <class... Parts>
  void note(const Parts&... parts) {
    if (traced_) trace_.push_back(time_text() + text_of(parts...) + "\n");
  }

 protected:
  virtual void play() = 0;

  std::mt19937_64 random_;
  Time now_{std::chrono::hours(1)};

 private:
  friend class Trace;
  template <class... Parts>
  static std::string text_of(const Parts&... parts) {
    std::ostringstream text;
    const auto put = [&text](const auto& part) {
      if constexpr (requires { text << part; }) {
        text << part;
      } else {
        text << to_string(part);
      }
    };
    (put(parts), ...);
    return text.str();
  }
  [[nodiscard]] std::string time_text() const;

  Agenda<Task> agenda_;
  std::string failure_;
  std::map<std::string, std::uint64_t> counts_;
  static bool traced_;
  std::vector<std::string> trace_;
};

// Runs a history by its number.
using Run = std::function<Outcome(std::uint64_t)>;

// The sums of what happened in the histories of a test.
struct Totals {
  std::map<std::string, std::uint64_t> counts{};
  std::uint64_t histories = 0;
  std::uint64_t of = 0;  // how many there are with ALL_HISTORIES=1
  Totals& operator+=(const Totals& other);
  std::uint64_t operator[](const std::string& what) const;
  // Bounds for all histories: a part of them has to show its part. One alone need not.
  void expect_over(const std::string& what, std::uint64_t least) const;
  void expect_under(const std::string& what, std::uint64_t most) const;
};

using testing::all_histories;
using testing::share_of;

// Runs histories from `first` on, share_of(count) of them, none of which may break a rule. The
// first that does is run again, and the end of its trace is printed. HISTORY=number replays
// that one alone, and prints all of its trace.
Totals run_histories(std::uint64_t first, std::uint64_t count, const Run& run);

}  // namespace stitch::simulation
