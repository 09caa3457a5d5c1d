#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

// What a callee says about a call that its caller has waited for too long: where it is, and which
// functions hold the threads. Thread contract: none; a value.
struct ThreadReport {
  enum State : std::uint8_t { unknown, queued, running, waiting };
  struct Holder {
    std::string function;
    std::int64_t longest_ns = 0;  // of its calls
    std::uint32_t threads = 0;
    template <class Archive>
    void serialize(Archive& archive) {
      archive(function, longest_ns, threads);
    }
  };
  std::uint8_t state = unknown;  // of the call; waiting: its function has begun and holds no thread
  std::int64_t ns = 0;           // for how long it has been
  std::uint32_t threads = 0;     // of the callee, for functions
  // Only of a queued call: the longest first, at most kHolders.
  std::vector<Holder> holders{};

  static constexpr std::size_t kHolders = 4;
  static constexpr std::size_t kMaxName = 512;  // of a function; the rest of a longer one is cut
  // Appends to the body, and reads what follows the question's number there. Throws
  // Error(protocol): more or longer names than that, or control characters in them.
  void write(OutMessage& message) const;
  [[nodiscard]] static ThreadReport read(InMessage& message);
  // "call was queued 4.9 s there behind f() (running 5.2 s on 2 of 2 threads)"; empty if unknown.
  [[nodiscard]] std::string text() const;
};

}  // namespace stitch::rpc
