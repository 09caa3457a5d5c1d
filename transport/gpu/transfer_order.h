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
// Pure state: no I/O, no clock, not thread-safe. Owned by a Lane, which locks. What an event asks
// for is returned: the clock value to send, the transfer to launch.
class TransferOrder {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // A directed pair of devices in one of its epochs; what breaks, breaks as a pair. Chosen by the
  // owner and never used again after drop_pair().
  using Pair = std::uint64_t;

  // Both ends agree on it.
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
    std::size_t launched_by_pair = 32;  // and of one pair
  };
  enum class End : std::uint8_t { source, destination };

  // No clock value exceeds this; at most so much beyond the own clock may one be that a peer sends.
  static constexpr std::uint64_t kMaxClock = std::uint64_t{1} << 62;
  static constexpr std::uint64_t kMaxClockStep = std::uint64_t{1} << 48;

  TransferOrder() : TransferOrder(Limits()) {}
  explicit TransferOrder(Limits limits) : limits_(limits) {}

  // A pair of which this device is one end. `source` is the uid of its source's worker. REQUIRES:
  // `pair` is new.
  void add_pair(Pair pair, End end, std::uint64_t source);
  // The pair is broken: a peer is lost, a CTS is late, a transfer was cancelled or failed. Its
  // transfers that are not launched leave the order; those launched count until finish(). Returns
  // the numbers of those that left. Nothing for a pair that is not there.
  std::vector<std::uint64_t> drop_pair(Pair pair);

  // Source: the bytes of the transfer are ready. Its entry is tentative until agree(). Returns the
  // clock value for its RTS; nothing when the pair is not there or the clock has reached its limit:
  // the transfer takes another path. REQUIRES: this end is the source, `number` is not in use.
  [[nodiscard]] std::optional<std::uint64_t> announce(Pair pair, std::uint64_t number, Time now);
  // Destination: an RTS with that clock value arrived. Its entry is final. Returns the clock value
  // for the CTS; nothing as announce(). Throws Error(protocol) for what no correct source sends: a
  // number that is in use, a clock value out of range, an RTS against the direction of the pair.
  [[nodiscard]] std::optional<std::uint64_t> accept(Pair pair, std::uint64_t number,
                                                    std::uint64_t clock);
  // Source: a CTS with that clock value arrived. False when the pair is not there any more. Throws
  // Error(protocol) for what no correct destination sends: a transfer that is not tentative, a
  // clock value that is out of range or not above that of the RTS.
  bool agree(Pair pair, std::uint64_t number, std::uint64_t clock);

  // Source: the destination will not launch that transfer, and the pair lives. True: it was
  // tentative, and has left the order.
  bool withdraw(Pair pair, std::uint64_t number);

  // The transfer to launch now, which leaves the order and counts as launched: the one with the
  // smallest key, when that is final and the limits allow it.
  [[nodiscard]] std::optional<Launch> launch();
  // The device has finished with a launched transfer, or it was aborted. REQUIRES: launch()
  // returned it, and finish() was not called for it.
  void finish(Pair pair);

  // The pairs with a transfer that was announced at `time` or before and has no CTS.
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
  // Keys of correct workers differ. The pair keeps those of a worker apart that uses another's uid.
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
  std::uint64_t clock_ = 0;  // at least every clock value of a final key here
  std::map<Pair, PairState> pairs_;
  std::map<Place, Entry> pending_;
  std::size_t launched_ = 0;
  std::map<Pair, std::size_t> launched_by_pair_;
};

}  // namespace stitch::transport::gpu
