#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace stitch::transport::gpu {

// The agreed order of one device's NCCL launches: Skeen's algorithm (D. Skeen, 1982; described in
// Birman and Joseph, "Reliable communication in the presence of failures", 1987, as ABCAST) between
// the two ends of each transfer. Every launched key is larger than all launched before on that
// device, and both ends launch under the same key; so the launches of all devices are parts of one
// total order, and no device waits for another that waits for it (PROTOCOL.md, "Order").
//
// Pure state: no I/O, no clock. Thread contract: not thread-safe; LaunchOrder owns it and locks.
class TransferOrder {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // A directed pair of devices in one of its epochs. Chosen by the owner, and never used again
  // after drop_pair().
  using Pair = std::uint64_t;

  // The key of a transfer, equal at both ends.
  struct Key {
    std::uint64_t clock = 0;
    std::uint64_t source = 0;  // uid of the source worker
    std::uint64_t number = 0;  // of the transfer, unique at its source
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Launch {
    Pair pair = 0;
    Key key;
  };
  struct Limits {
    std::size_t launched = 64;          // launched and not finished, on the device
    std::size_t launched_by_pair = 32;  // likewise, of one pair
  };
  enum class End : std::uint8_t { source, destination };

  // The largest clock value, and the largest step of a peer's clock value beyond the own clock.
  static constexpr std::uint64_t kMaxClock = std::uint64_t{1} << 62;
  static constexpr std::uint64_t kMaxClockStep = std::uint64_t{1} << 48;

  TransferOrder() : TransferOrder(Limits()) {}
  explicit TransferOrder(Limits limits) : limits_(limits) {}

  // Adds a pair with an end at this device. `source` is the uid of the worker at its source.
  // REQUIRES: `pair` is new.
  void add_pair(Pair pair, End end, std::uint64_t source);
  // Drops a broken pair: its pending transfers leave the order, its launched ones count until
  // finish(). Returns the numbers of the pending ones.
  std::vector<std::uint64_t> drop_pair(Pair pair);

  // Source: enters a tentative transfer. Returns the clock value for its RTS; nothing without the
  // pair, or at the limit of the clock. REQUIRES: this end is the source, `number` is not in use.
  [[nodiscard]] std::optional<std::uint64_t> announce(Pair pair, std::uint64_t number, Time now);
  // Destination: enters a final transfer, by the clock value of its RTS. Returns the clock value
  // for the CTS, or nothing as announce() does. Throws Error(protocol) for an RTS of no correct
  // source: a number in use, a clock value out of range, the wrong direction.
  [[nodiscard]] std::optional<std::uint64_t> accept(Pair pair, std::uint64_t number,
                                                    std::uint64_t clock);
  // Source: makes a transfer final, by the clock value of its CTS. Returns false without the pair.
  // Throws Error(protocol) for a CTS of no correct destination: a transfer that is not tentative, a
  // clock value out of range or not above that of the RTS.
  bool agree(Pair pair, std::uint64_t number, std::uint64_t clock);

  // Source: the destination will not launch that transfer. Returns whether it was tentative: then
  // it has left the order.
  bool withdraw(Pair pair, std::uint64_t number);

  // The next launch: the pending transfer with the smallest key, if that is final and the limits
  // allow it. The transfer leaves the order and counts as launched.
  [[nodiscard]] std::optional<Launch> launch();
  // A launched transfer has ended, or was aborted. REQUIRES: once for each launch().
  void finish(Pair pair);

  // The pairs with a tentative transfer that was announced at `time` or before.
  [[nodiscard]] std::vector<Pair> overdue(Time time) const;

  [[nodiscard]] std::size_t pending() const noexcept { return pending_.size(); }
  [[nodiscard]] std::size_t launched() const noexcept { return launched_; }
  [[nodiscard]] std::uint64_t clock() const noexcept { return clock_; }

 private:
  struct PairState {
    End end = End::source;
    std::uint64_t source = 0;
    std::map<std::uint64_t, Key> keys;  // of its pending transfers, by number
  };
  // Keys of correct workers differ. The pair keeps apart the keys of a worker with another's uid.
  struct Place {
    Key key;
    Pair pair = 0;
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  struct Entry {
    bool final = false;
    Time announced;  // of tentative ones
  };

  [[nodiscard]] PairState* find(Pair pair);
  void check_clock(std::uint64_t clock, const char* frame) const;

  Limits limits_;
  std::uint64_t clock_ = 0;  // at least the clock value of every final key here
  std::map<Pair, PairState> pairs_;
  std::map<Place, Entry> pending_;
  std::size_t launched_ = 0;
  std::map<Pair, std::size_t> launched_by_pair_;
};

}  // namespace stitch::transport::gpu
