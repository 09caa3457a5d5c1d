#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "call_book.h"
#include "remote_functions.h"
#include "stitch/rpc/worker.h"

namespace stitch_reliability {

// Which workers cannot be reached from here, and since when. Thread contract: any thread.
class Links {
 public:
  explicit Links(const stitch::Worker& self) : rank_(self.rank()), workers_(self.world_size()) {}

  void heard(int rank) { failing_since_.at(static_cast<std::size_t>(rank)) = 0; }
  void failed(const stitch::Error& error);
  // Whether this life is of no use any more: it was declared dead, or has lost, though they live,
  // all others for 4 s or one of a lower rank for 10 s. (A connection that was lost for good is not
  // replaced within the two lives: one of the two has to begin another life.)
  [[nodiscard]] bool useless() const;

 private:
  [[nodiscard]] bool lost(int rank, std::chrono::nanoseconds time) const;

  const int rank_;
  const int workers_;
  std::atomic<bool> fenced_{false};
  std::array<std::atomic<std::int64_t>, CallBook::kMaxWorkers> failing_since_{};
};

// What a thread waits for, in the book while this lives. One inside another: the inner counts.
class WaitScope {
 public:
  static constexpr std::uint64_t kRound = ~std::uint64_t{0};         // several operations
  static constexpr std::uint64_t kShutdown = ~std::uint64_t{0} - 1;  // shutdown()
  WaitScope(Waiting& waiting, std::uint64_t number, std::chrono::nanoseconds limit)
      : waiting_(waiting), number_(waiting.number), due_(waiting.due) {
    set(number, now_ns() + limit.count());
  }
  ~WaitScope() { set(number_, due_); }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  void set(std::uint64_t number, std::int64_t due) {
    waiting_.number = 0;
    waiting_.due = due;
    waiting_.number = number;
  }
  Waiting& waiting_;
  const std::uint64_t number_;
  const std::int64_t due_;
};

struct TrafficSettings {
  std::uint64_t seed = 1;
  std::vector<std::string> work;     // of "calls", "references", "gradients", "steps"
  std::chrono::nanoseconds pause{};  // between rounds
  std::chrono::nanoseconds slack{};  // beyond a deadline, before an operation counts as hung
};

// Throws std::invalid_argument for kinds of work that are unknown.
void check_work(const std::vector<std::string>& work);

// The operations of one thread of a worker, one round after the other. Thread contract: one thread.
class Traffic {
 public:
  Traffic(stitch::Worker& self, const TrafficSettings& settings, int life, int thread,
          Links& links);
  // Until the run is over or `stop`.
  void run(const std::atomic<bool>& stop);

 private:
  struct Shared;  // a parameter somewhere, and the reference to its tensor
  // One operation, within `limit`. True if it brought its result.
  bool operate(Kind kind, int peer, std::chrono::nanoseconds limit,
               const std::function<void(std::uint64_t number)>& work);
  void calls();
  void tensors();
  void references();
  void gradients();
  void steps();
  bool make_parameter(Shared& shared);
  [[nodiscard]] int other();  // the rank of another worker
  [[nodiscard]] std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  [[nodiscard]] std::chrono::nanoseconds some_time();
  static void expect(bool right, const char* what);

  stitch::Worker& self_;
  const TrafficSettings& settings_;
  const int life_;
  const int workers_;
  Waiting& waiting_;
  Links& links_;
  std::mt19937_64 random_;
};

}  // namespace stitch_reliability
