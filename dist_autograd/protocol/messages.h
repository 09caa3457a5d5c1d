#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/dist_autograd/graph/positions.h"

// The messages between workers about contexts and backward passes. Their use is in PROTOCOL.md.
namespace stitch::dist_autograd::wire {

enum FrameKind : std::uint16_t {
  kMark = 0x140,          // the loss uses these links
  kAck = 0x141,           // GRADIENTS, MARK or QUIET have been dealt with
  kCloseMarking = 0x142,  // marking has ended, the rest is dead
  kGradients = 0x143,     // gradients for the senders' side of links
  kDone = 0x144,          // this worker has finished its part
  kAbort = 0x145,         // the pass has failed
  kRelease = 0x146,       // a context has ended
  kQuiet = 0x147,         // no gradient is in flight and no strand runs: finish, or mark
};
inline constexpr FrameKind kFirstKind = kMark;
inline constexpr FrameKind kLastKind = kQuiet;
// On requests and replies: the context they belong to and the link that their tensors make.
inline constexpr std::uint16_t kContextSection = 0x140;
// On a request: it was made with grad mode off, so it runs with grad mode off. On its reply: the
// caller gets tensors that do not require grad. One byte, ignored.
inline constexpr std::uint16_t kNoGradSection = 0x141;
// On a request: it was made with autocast on, so it runs with autocast on. Two bytes: autocast on
// the CPU and on CUDA devices; 0 off, else the dtype it casts to (carried_autocast.cc).
inline constexpr std::uint16_t kAutocastSection = 0x142;
// On a request or reply without a context: which of its tensors have history at the sender, as u32
// indexes.
inline constexpr std::uint16_t kHistorySection = 0x143;

struct PassHeader {
  ContextId context;
  PassId pass;
  std::uint8_t flags = 0;
  enum Flag : std::uint8_t {
    kRetainGraph = 1,
    kCreateGraph = 2,
    kAnomaly = 4,
    kOnlyInputs = 8,  // leaves of workers other than the root get no gradients
    kAllowNaN = 16,   // in anomaly mode, too
  };
  template <class Archive>
  void serialize(Archive& archive) {
    archive(context.home, context.epoch, context.counter, pass.root, pass.epoch, pass.counter,
            flags);
  }
};

struct Mark {
  std::vector<std::uint64_t> links;  // counters of the receiver's own links
  template <class Archive>
  void serialize(Archive& archive) {
    archive(links);
  }
};

// Alone, or at the beginning of GRADIENTS.
struct Ack {
  std::uint32_t count = 0;
  // With the last one that is owed, which ends the sender's engagement: the workers that took part
  // below it, and itself. Empty in others.
  std::vector<WorkerId> participants;
  // With participants: by how much the number of links has grown (modulo 2^64) that got no gradient
  // on these workers, since each of them was last named.
  std::uint64_t missing = 0;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(count, participants);
    if (!participants.empty()) archive(missing);
  }
};

// With QUIET and CLOSE_MARKING, one of which each participant of a pass that succeeds gets from its
// root: what has become of the passes that the root began before this one, in this context.
struct OlderPasses {
  static constexpr std::size_t kMaxOpen = 512;
  // Those that have not ended, by their counters, ascending; all others have. If there are more
  // than kMaxOpen, the highest, and nothing is said of those below the first.
  std::vector<std::uint64_t> open;
  // Whether it can be said in the pass of that counter.
  [[nodiscard]] bool valid_before(std::uint64_t counter) const noexcept {
    return open.size() <= kMaxOpen && (open.empty() || open.back() < counter) &&
           std::adjacent_find(open.begin(), open.end(), std::greater_equal<>()) == open.end();
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(open);
  }
};

// The gradients of one link. Followed in the message by its defined tensors, in order.
struct GradientEntry {
  std::uint64_t link = 0;  // a counter of the receiver's own links
  std::uint64_t gradient_link =
      0;  // create_graph: a new link of the sender's, over the tensors that require grad; 0: none
  std::uint32_t count = 0;  // of the tensors of the link
  // Among them:
  Positions undefined;       // these have no gradient; position count + i: tensor i has none though
                             // the roots depend on it, which the others do not
  Positions differentiable;  // these belong to gradient_link

  void add_undefined(std::uint32_t tensor, bool unreached) {
    undefined.add(tensor);
    if (!unreached) undefined.add(count + tensor);
  }
  [[nodiscard]] bool is_unreached(std::uint32_t tensor) const noexcept {
    return undefined.has(tensor) && !undefined.has(count + tensor);
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(link, gradient_link, count, undefined, differentiable);
  }
};

struct Release {
  ContextId context;
  // All contexts of this home below this counter have ended. Only valid from the home itself.
  std::uint64_t low_water = 0;
  // So have those from this counter on, up to that of `context`. As that.
  std::uint64_t ended_from = 0;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(context.home, context.epoch, context.counter, low_water, ended_from);
  }
};

}  // namespace stitch::dist_autograd::wire
