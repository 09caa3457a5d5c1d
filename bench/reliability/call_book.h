#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "stitch/base/error.h"

namespace stitch_reliability {

using Clock = std::chrono::steady_clock;  // the same in all processes of a host

// Nanoseconds of Clock, for memory that processes share.
[[nodiscard]] inline std::int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

// What an operation is.
enum class Kind : std::uint8_t { call, tensors, one_way, nested, create, method, backward, step };
inline constexpr std::size_t kKinds = 8;
[[nodiscard]] const char* to_string(Kind kind);

// How an operation ended: 0 not yet, 1 with its result, 1 + code with an error.
using Outcome = std::uint8_t;
inline constexpr Outcome kNone = 0;
inline constexpr Outcome kOk = 1;
inline constexpr std::size_t kOutcomes = 14;
[[nodiscard]] inline Outcome outcome_of(const stitch::Error& error) {
  return static_cast<Outcome>(1 + static_cast<int>(error.code()));
}

// How a life of a worker ended.
enum class End : std::uint8_t {
  none,     // it runs
  itself,   // with the run
  fenced,   // it was declared dead, or lost its links, and left
  killed,   // by the run
  no_start  // init() failed
};

// One life of a worker.
struct Life {
  std::atomic<int> rank{0};
  std::atomic<End> end{End::none};
  std::atomic<std::int64_t> kib_at_start{0};  // of its own memory, soon after init()
  std::atomic<std::int64_t> kib_at_end{0};
  std::atomic<std::int64_t> connections_replaced{0};  // as it last knew
  std::atomic<std::int64_t> objects_left{0};
  std::atomic<std::int64_t> contexts_left{0};
  std::atomic<bool> left_gracefully{false};
};

// What one thread of a worker waits for at this moment.
struct Waiting {
  std::atomic<std::uint64_t> number{0};  // of the operation; 0: none
  std::atomic<std::int64_t> due{0};      // when it has to be over
};

// What all processes of a run know of its operations, in memory that they share, so that it
// survives each of them. The process that forks all others makes it. Thread contract: any thread,
// any process.
class CallBook {
 public:
  static constexpr std::size_t kMaxOperations = std::size_t{1} << 26;
  static constexpr std::size_t kMaxLives = std::size_t{1} << 14;
  static constexpr int kMaxWorkers = 64;
  static constexpr int kMaxThreads = 4;

  struct Operation {
    std::atomic<std::uint16_t> life;
    std::atomic<Kind> kind;
    std::atomic<Outcome> outcome;
    std::atomic<std::uint8_t> ends;  // how often it has ended: 1
    std::atomic<std::uint8_t> runs;  // how often it was run by its callee
  };

  // Maps the memory; throws std::system_error.
  static CallBook& make();

  // A new operation of a life; its number is above 0. Throws std::runtime_error when the book is
  // full.
  [[nodiscard]] std::uint64_t begin(Kind kind, int life);
  // The callee runs it.
  void run(std::uint64_t number);
  // It ended.
  void end(std::uint64_t number, Outcome outcome);
  // The same, with an error. The first text of each code is kept.
  void end(std::uint64_t number, const stitch::Error& error);

  [[nodiscard]] Operation& operation(std::uint64_t number) { return operations_[number]; }
  [[nodiscard]] std::uint64_t operations() const { return next_.load() - 1; }

  std::array<Life, kMaxLives> lives;
  std::array<std::array<Waiting, kMaxThreads>, kMaxWorkers> waiting;
  // When the present life of a worker finished init(); 0: it has not.
  std::array<std::atomic<std::int64_t>, kMaxWorkers> up;
  std::atomic<bool> over{false};  // all are asked to finish
  // The first error of each code.
  struct Sample {
    std::atomic<bool> taken;
    std::array<char, 400> text;
  };
  std::array<Sample, kOutcomes> samples;
  std::atomic<std::uint64_t> wrong{0};   // results that are not what they must be
  std::atomic<std::uint64_t> passes{0};  // backward passes whose gradients were compared
  std::atomic<std::uint64_t> steps{0};   // rounds of steps whose parameters were compared

 private:
  std::atomic<std::uint64_t> next_{1};
  std::array<Operation, kMaxOperations> operations_;
};

// That of this process's run, once it is made.
[[nodiscard]] CallBook& book();

// The memory of a process that is its own (RssAnon), in KiB; 0 when it is gone.
[[nodiscard]] std::int64_t own_kib(const std::string& process = "self");

}  // namespace stitch_reliability
