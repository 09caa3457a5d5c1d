#pragma once

// One file, though long: what is counted against one limit, in both directions.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/agent/begin_order.h"
#include "stitch/rpc/message/precedence.h"

namespace stitch::rpc {

// What one worker has under way to one peer and from it, and the requests that wait to be sent to
// it. A request counts from its sending to its answer, a one-way one until the peer says that it
// has been dealt with, so the caller's counts bound what the callee holds:
//
//   made --try_begin()--> under way --end()--> over
//     \--wait()--> waiting --> under way
//
// Calls of the program ("outside") may have half of the byte limit and `calls` calls under way; the
// others wait here, with those under way within the whole limit; their threads wait for more, and
// go on in the order in which they came: none is kept before one whose thread waited already.
// Calls of handlers, continuations and callbacks ("inside") have the whole limit and twice the
// calls under way, and as many bytes again may wait. They do not wait for those of the program,
// which may wait for them, but for a time: see look(). While one that exceeds half of the limit
// waits for room, no call of the program begins. A request of any size up to the limit goes when
// nothing else is under way. Whatever its peer has room for, a request is passed to the transport
// only when little is unwritten there: so those that are cancelled or late meanwhile are never
// written. Small and large ones do not wait for each other.
//
// A request does not begin before one that it follows (Precedence), which would wait at the peer
// for a request that has no room here. Where one inside follows calls of the program, those begin
// by the limits of calls inside, too: what they wait for may wait for it. They still let calls
// inside go first.
//
// Thread contract: any thread. No lock is held while a request's `go` is called.
class PeerFlow {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    std::size_t bytes = 0;
    std::size_t calls = 0;
  };
  // What a call takes on either side beside its message.
  static constexpr std::size_t kCallBytes = 2048;
  // Bytes that the transport may have unwritten when it gets another small or large request.
  static constexpr std::size_t kSmallWindow = std::size_t{1} << 20;
  static constexpr std::size_t kLargeWindow = std::size_t{4} << 20;
  static constexpr std::size_t kSmallBytes = std::size_t{32} << 10;
  static constexpr std::size_t kMaxCalls = std::size_t{1} << 20;  // of Limits::calls

  explicit PeerFlow(const Limits& limits);
  PeerFlow(const PeerFlow&) = delete;
  PeerFlow& operator=(const PeerFlow&) = delete;

  // ---- tensors that come beside their message, from device to device
  // What a request counts, here and at its receiver, that has `beside` bytes of them: they take
  // memory as what is in it does. Together they count at most half of the limit, with the call.
  [[nodiscard]] std::size_t counted(std::size_t bytes, std::size_t beside) const noexcept;
  // What a reply or a frame counts, likewise: more than its bytes, since it takes as much as a call
  // while it waits for them.
  [[nodiscard]] std::size_t counted_data(std::size_t bytes, std::size_t beside) const noexcept {
    return std::min(counted(bytes, beside) + kCallBytes, limits_.bytes);
  }

  // ---- requests to the peer
  struct Size {
    std::size_t bytes = 0;  // of the message
    bool inside = false;
    [[nodiscard]] bool small() const noexcept { return bytes <= kSmallBytes; }
    [[nodiscard]] std::size_t cost() const noexcept { return bytes + kCallBytes; }
  };
  // Counts a request as under way and unwritten. False when it has to wait.
  [[nodiscard]] bool try_begin(const Size& size) noexcept STITCH_EXCLUDES(mutex_) {
    if (waits_before(size)) return false;
    if (take(size)) [[likely]] {
      if (size.inside) used_inside_.fetch_add(packed(size));
      return true;
    }
    // What take() held for a moment may have kept another one from beginning.
    if (waiting_.load() != 0) pump();
    return false;
  }
  // Whether a request inside that is made now has to begin after one that waits. One of the program
  // waits for all of them in any case.
  [[nodiscard]] bool waits_behind(const Precedence& precedence) const STITCH_EXCLUDES(mutex_);
  // Whether any request waits. Those that the same thread has made before are known here.
  [[nodiscard]] bool any_wait() const noexcept {
    return waiting_.load(std::memory_order_relaxed) != 0;
  }
  // Its answer has come, or never will.
  void end(const Size& size) noexcept STITCH_EXCLUDES(mutex_) {
    uncount(size);
    if (waiting_.load() != 0) pump();
  }
  // The transport has written it, or dropped it.
  void written(const Size& size) noexcept STITCH_EXCLUDES(mutex_) {
    (size.small() ? unwritten_small_ : unwritten_large_).fetch_sub(size.bytes);
    if (waiting_.load() != 0) pump();
  }

  // A request that waits. `go()` sends it once it is counted as begun, unless it is not wanted any
  // more: then it returns false. Destroyed without a call when it is dropped. `id`, not 0: its
  // place.
  struct Waiting {
    Size size;
    std::uint64_t id = 0;
    base::UniqueFunction<bool()> go;
    Precedence precedence{};
    bool always_kept = false;  // it waits, whatever else does: a small one, of which there are few
    bool refuses = false;      // it does not wait for room, only while calls inside are held up
    // Of one that refuses: called in place of `go` when there is no room once they are held up no
    // longer. Empty: it waits for room then.
    base::UniqueFunction<void()> refused{};
  };
  enum class Kept : std::uint8_t { waits, late, unwanted, full };
  // Keeps a request until it can begin. Where bytes for that are missing, or another thread waits
  // for some already, waits for them on this thread, while `wanted` (which must not throw) until
  // the deadline; inside it does not: `full`. One that refuses is `full`, too, if it is not only
  // held up (see look()), and has no room. What is not kept stays the caller's.
  [[nodiscard]] Kept wait(Waiting& request, Clock::time_point deadline,
                          const std::function<bool()>& wanted) STITCH_EXCLUDES(mutex_);
  // How often look() is to be called while it returns true.
  static constexpr std::chrono::milliseconds kLook{50};
  // Calls inside that overlap could keep the first waiting request of the program from beginning
  // without end. Once they have for kOvertaken, those that are made from then on wait behind it,
  // for as long, and go on for as long; then both for twice as long each, up to kLongestHold, until
  // it begins. What is under way ends meanwhile, but for what waits for one of those: that ends
  // later, since they are held up half of the time at most. They are let go before where they would
  // fill what may wait. Nothing is held up where the program itself has what that request needs.
  // Those that are held up are not refused for that, but for the room that they would not have had.
  // False: no request of the program waits, and this need not be called.
  static constexpr std::chrono::milliseconds kOvertaken{100};
  static constexpr std::chrono::milliseconds kLongestHold{5000};
  [[nodiscard]] bool look(Clock::time_point now) noexcept STITCH_EXCLUDES(mutex_);
  // For how long calls inside were held up between two times, of the last kHolds times that they
  // were, and behind which request the last time.
  struct HeldUp {
    Clock::duration time{0};
    std::size_t bytes = 0;         // of that request's message
    Clock::duration overtaken{0};  // how long it had been kept waiting by then
  };
  static constexpr std::size_t kHolds = 8;
  [[nodiscard]] HeldUp held_up(Clock::time_point from, Clock::time_point until) const
      STITCH_EXCLUDES(mutex_);
  // Drops a waiting request, if it is there.
  void drop(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  // The peer is lost, or this worker stops: drops all, and nothing waits from now on.
  // Takes no memory: what waits for a lost peer ends where there is none.
  void give_up() noexcept STITCH_EXCLUDES(mutex_);

  // ---- one-way requests: who sends them asks for room, who has handled them gives it back
  // One is under way. Returns the number to ask for (see asked()), 0: nothing is to be asked.
  [[nodiscard]] std::uint64_t one_way_begun(const Size& size) STITCH_EXCLUDES(mutex_);
  // Likewise, for requests that wait.
  [[nodiscard]] std::uint64_t to_ask() STITCH_EXCLUDES(mutex_);
  // It has not been sent.
  void one_way_failed(const Size& size) noexcept STITCH_EXCLUDES(mutex_);
  // What the peer has handled since the beginning. Returns what to ask for next, 0: nothing.
  struct Handled {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
  };
  [[nodiscard]] std::uint64_t given_back(const Handled& handled) STITCH_EXCLUDES(mutex_);
  // A one-way request of the peer has been handled; what to tell it, if it wants to know by now.
  [[nodiscard]] std::optional<Handled> handled(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_);
  // The peer wants to know until `calls` have been handled; what to tell it now.
  [[nodiscard]] Handled asked(std::uint64_t calls) STITCH_EXCLUDES(mutex_);

  // ---- requests of the peer
  // Counts one. The limit that it exceeds, as text; empty when there is room. end_held() in any
  // case.
  static constexpr char kBytesName[] = "max_inflight_bytes";  // one address in all units
  [[nodiscard]] const char* hold(std::size_t bytes) noexcept;
  void end_held(std::size_t bytes) noexcept { held_.fetch_sub(packed(bytes + kCallBytes)); }

  // ---- replies and frames of the peer that wait for tensors beside them
  // Counts one. False when that exceeds the limit; end_held_data() in any case.
  [[nodiscard]] bool hold_data(std::size_t bytes) noexcept {
    return held_data_.fetch_add(bytes) + bytes <= limits_.bytes;
  }
  void end_held_data(std::size_t bytes) noexcept { held_data_.fetch_sub(bytes); }

  // ---- replies to the peer, which are refused for nothing: they are what makes room
  // Counts one that has been made, until it is written, or its tensors beside it have arrived.
  void add_data(std::size_t bytes) noexcept { data_bytes_.fetch_add(bytes); }
  // Counts one as passed to the transport, which gets at most the limit: what it has not written it
  // has to keep until the peer says that it has it. False, and it is not counted, when it has to
  // wait.
  [[nodiscard]] bool try_begin_reply(std::size_t bytes) noexcept {
    return replies_waiting_.load() == 0 && take_reply(bytes);
  }
  // Keeps a reply until there is room, behind those that wait already. `go()` sends it once it is
  // counted, also when the peer is lost: it fails then. Called once, unless this throws.
  void wait_reply(std::size_t bytes, base::UniqueFunction<void()> go) STITCH_EXCLUDES(mutex_);
  // One that was passed to the transport: before data_written().
  void reply_ended(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_) {
    replies_begun_.fetch_sub(bytes);
    if (replies_waiting_.load() != 0) pump_replies();
  }
  void data_written(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_) {
    const std::size_t left = data_bytes_.fetch_sub(bytes) - bytes;
    if (parked_count_.load() != 0 && left <= limits_.bytes / 4) unpark();
  }
  // Whether replies take half of the limit, or tasks wait for that to end, which go first.
  [[nodiscard]] bool many_replies() const noexcept {
    return data_bytes_.load(std::memory_order_relaxed) > limits_.bytes / 2 ||
           parked_count_.load(std::memory_order_relaxed) != 0;
  }
  // Keeps `task`, which is about to make another reply, while that is so: until a half of these
  // replies is written. False, and it is left untouched, when it is not so, or memory is short.
  [[nodiscard]] bool park(base::UniqueFunction<void()>& task) STITCH_EXCLUDES(mutex_);

  // ---- frames to the peer, which wait for each other, not for replies, which could keep them out
  // Counts one that is not written yet, as a reply. False, and it is not counted, when it has to
  // wait: frames take half of the limit, a larger one goes alone.
  [[nodiscard]] bool try_begin_frame(std::size_t bytes) noexcept;
  // Keeps a frame until there is room, behind those that wait already. `go(true)` sends it once it
  // is counted, also when the peer is lost: it fails then. `go(false)`: it has been dropped. One of
  // them is called, once, unless this throws.
  using FrameGo = base::UniqueFunction<void(bool)>;
  void wait_frame(std::size_t bytes, const void* owner, FrameGo go) STITCH_EXCLUDES(mutex_);
  // Drops those of `owner` that wait.
  void drop_frames(const void* owner) noexcept STITCH_EXCLUDES(mutex_);
  void frame_written(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_) {
    frames_unwritten_.fetch_sub(bytes);
    if (frames_waiting_.load() != 0) pump_frames();
  }
  // Whether those that wait exceed half of the limit: who makes them should stop.
  [[nodiscard]] bool many_frames() const noexcept {
    return waiting_frame_bytes_.load(std::memory_order_relaxed) > limits_.bytes / 2;
  }

  // ---- numbers
  std::atomic<std::size_t> control_bytes{0};  // control frames, not written yet
  struct Numbers {
    std::size_t calls = 0;            // under way
    std::size_t bytes = 0;            // likewise, with kCallBytes each
    std::size_t unwritten_bytes = 0;  // of these, with the transport
    std::size_t waiting = 0;          // requests
    std::size_t waiting_bytes = 0;
    std::size_t held_calls = 0;  // of the peer
    std::size_t held_bytes = 0;
    std::size_t data_bytes = 0;
    std::size_t frame_bytes = 0;  // not written yet
    std::size_t waiting_frames = 0;
    std::size_t waiting_frame_bytes = 0;
  };
  [[nodiscard]] Numbers numbers() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] const Limits& limits() const noexcept { return limits_; }

 private:
  // Calls in the upper bits, bytes in the others.
  static constexpr int kByteBits = 42;
  static constexpr std::uint64_t kByteMask = (std::uint64_t{1} << kByteBits) - 1;
  [[nodiscard]] static std::uint64_t packed(std::size_t bytes, std::uint64_t calls = 1) noexcept {
    return (calls << kByteBits) + bytes;
  }
  [[nodiscard]] static std::uint64_t packed(const Size& size) noexcept {
    return packed(size.cost());
  }
  // Requests inside in queues_, in units of this, and others that are there, or threads. One more
  // inside while holds_inside_. What is in followers_ follows one of those.
  static constexpr std::uint64_t kInside = std::uint64_t{1} << 32;
  [[nodiscard]] bool waits_before(const Size& size) const noexcept {
    const auto waiting = waiting_.load(std::memory_order_relaxed);
    return size.inside ? waiting >= kInside : waiting != 0;
  }
  void uncount(const Size& size) noexcept {
    if (size.inside) used_inside_.fetch_sub(packed(size));
    used_.fetch_sub(packed(size));
  }
  [[nodiscard]] bool take(const Size& size) noexcept;
  // Whether little enough is unwritten for one more.
  [[nodiscard]] bool window_open(const Size& size) const noexcept;
  [[nodiscard]] bool has_room(const Size& size, std::uint64_t used) const noexcept {
    return has_room(size, used >> kByteBits, used & kByteMask);
  }
  [[nodiscard]] bool has_room(const Size& size, std::uint64_t calls,
                              std::uint64_t bytes) const noexcept;
  void pump() noexcept STITCH_EXCLUDES(mutex_);
  void unpark() noexcept STITCH_EXCLUDES(mutex_);
  struct WaitingFrame {
    std::size_t bytes;
    const void* owner;
    FrameGo go;
  };
  struct WaitingReply {
    std::size_t bytes;
    base::UniqueFunction<void()> go;
  };
  [[nodiscard]] bool take_reply(std::size_t bytes) noexcept;
  void pump_replies() noexcept STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool take_frame(std::size_t bytes) noexcept;
  void pump_frames() noexcept STITCH_EXCLUDES(mutex_);
  // In which queue a request waits, and by which limits it begins.
  enum class Rank : std::uint8_t {
    program,
    lifted,  // of the program, and one inside follows it
    inside,
  };
  static constexpr std::size_t kRanks = 3;
  struct Entry {
    Entry(Waiting&& made, Rank of) noexcept : request(std::move(made)), rank(of) {}
    // As its rank has it.
    [[nodiscard]] Size size() const noexcept { return {request.size.bytes, rank != Rank::program}; }
    Waiting request;
    Rank rank;
    Entry* next = nullptr;  // in the list of lift()
  };
  using Queue = std::map<std::uint64_t, Entry>;
  // What begins now. `refused`: what is to be told instead that there is no room.
  [[nodiscard]] std::optional<Waiting> next(Queue& refused) STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::optional<Waiting> next_of(Rank rank) STITCH_REQUIRES(mutex_);
  [[nodiscard]] Waiting extract(Queue& queue, Queue::iterator at) STITCH_REQUIRES(mutex_);
  [[nodiscard]] Queue& queue_of(const Entry& kept) STITCH_REQUIRES(mutex_) {
    return queues_[static_cast<std::size_t>(kept.rank)][kept.request.size.small()];
  }
  static std::uint64_t units(const Size& size) noexcept { return size.inside ? kInside : 1; }
  // It is in queues_ now.
  void count_queued(const Size& size) noexcept STITCH_REQUIRES(mutex_) {
    waiting_.fetch_add(units(size));
    if (size.inside) queued_inside_bytes_ += size.cost();
  }
  void keep(Waiting& request) STITCH_REQUIRES(mutex_);
  // Calls `go` of one that is counted as begun.
  void send(Waiting& request) noexcept STITCH_EXCLUDES(mutex_);
  // Calls `refused` of each.
  static void tell(Queue& refused) noexcept;
  void lift(Entry& follower) noexcept STITCH_REQUIRES(mutex_);
  Entry* lift_one(std::uint64_t id) noexcept STITCH_REQUIRES(mutex_);
  void let_follow(std::uint64_t id, const Precedence& precedence) noexcept STITCH_REQUIRES(mutex_);
  // ---- requests that refuse, while calls inside are held up
  // Whether one that is made now would have begun if none were.
  [[nodiscard]] bool only_held(const Waiting& request) const STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool leaders_only_held(std::uint64_t key, std::uint64_t id) const
      STITCH_REQUIRES(mutex_);
  // As try_begin(), and waits_behind().
  [[nodiscard]] bool begins_now(const Waiting& request) noexcept STITCH_REQUIRES(mutex_);
  // None inside begins now. Moves those that refuse to `refused` where that is for want of room.
  // True: another one is the first now.
  [[nodiscard]] bool refuse_held(Queue& refused) noexcept STITCH_REQUIRES(mutex_);
  void refuse_one(Queue& from, Queue::iterator at, Queue& refused) noexcept STITCH_REQUIRES(mutex_);
  void refuse_all(Queue& from, Queue& refused) noexcept STITCH_REQUIRES(mutex_);
  // ---- requests of the program that others keep waiting
  // Whether the bytes that wait leave enough for one more that does.
  [[nodiscard]] bool may_wait(const Size& size, std::uint64_t used) const noexcept
      STITCH_REQUIRES(mutex_);
  // Waits until it is the first of those whose threads wait and may_wait(). Kept::waits then.
  [[nodiscard]] Kept await_turn(const Waiting& request, Clock::time_point deadline,
                                const std::function<bool()>& wanted) STITCH_REQUIRES(mutex_);
  // The first one that waits to begin; null: none.
  [[nodiscard]] const Entry* first_outside() const STITCH_REQUIRES(mutex_);
  // What is under way, packed, without calls inside.
  [[nodiscard]] std::uint64_t used_outside() const STITCH_REQUIRES(mutex_);
  void hold_inside(bool hold) noexcept STITCH_REQUIRES(mutex_);
  // That request has begun, or never will.
  void end_wait(std::uint64_t id) noexcept STITCH_REQUIRES(mutex_) {
    if (id != overtaken_) return;
    overtaken_ = 0;
    hold_inside(false);
  }
  [[nodiscard]] std::uint64_t outstanding_calls() const STITCH_REQUIRES(mutex_) {
    return one_way_calls_ - returned_.calls;
  }

  const Limits limits_;
  alignas(64) std::atomic<std::uint64_t> used_{0};
  std::atomic<std::uint64_t> used_inside_{0};  // of these, without one-way ones
  std::atomic<std::size_t> unwritten_small_{0};
  std::atomic<std::size_t> unwritten_large_{0};
  std::atomic<std::uint64_t> waiting_{0};
  alignas(64) std::atomic<std::uint64_t> held_{0};
  std::atomic<std::size_t> data_bytes_{0};     // replies that are made
  std::atomic<std::size_t> replies_begun_{0};  // of these, with the transport; bytes
  std::atomic<std::size_t> replies_waiting_{0};
  std::atomic<std::size_t> held_data_{0};
  std::atomic<std::size_t> parked_count_{0};
  std::atomic<std::size_t> frames_waiting_{0};
  std::atomic<std::size_t> frames_unwritten_{0};     // bytes
  std::atomic<std::size_t> waiting_frame_bytes_{0};  // of frames_; written under mutex_
  std::atomic<std::uint64_t> handled_calls_{0};
  std::atomic<std::uint64_t> handled_bytes_{0};
  std::atomic<std::uint64_t> tell_at_;  // handled calls

  mutable base::Mutex mutex_;
  base::CondVar room_;
  Queue queues_[kRanks][2] STITCH_GUARDED_BY(mutex_);  // by rank, small
  Queue followers_ STITCH_GUARDED_BY(mutex_);          // until what they follow has begun
  BeginOrder order_ STITCH_GUARDED_BY(mutex_);         // of all these, and of the one in pump()
  std::size_t waiting_bytes_[2] STITCH_GUARDED_BY(mutex_){};
  std::size_t queued_inside_bytes_ STITCH_GUARDED_BY(mutex_) = 0;  // of these, in queues_
  std::list<base::UniqueFunction<void()>> parked_ STITCH_GUARDED_BY(mutex_);
  std::list<WaitingReply> replies_ STITCH_GUARDED_BY(mutex_);
  bool pumping_replies_ STITCH_GUARDED_BY(mutex_) = false;
  bool pump_replies_again_ STITCH_GUARDED_BY(mutex_) = false;
  std::list<WaitingFrame> frames_ STITCH_GUARDED_BY(mutex_);
  bool pumping_frames_ STITCH_GUARDED_BY(mutex_) = false;
  bool pump_frames_again_ STITCH_GUARDED_BY(mutex_) = false;
  bool pumping_ STITCH_GUARDED_BY(mutex_) = false;
  bool pump_again_ STITCH_GUARDED_BY(mutex_) = false;
  bool given_up_ STITCH_GUARDED_BY(mutex_) = false;
  std::list<const Waiting*> blocked_ STITCH_GUARDED_BY(mutex_);  // of threads, in their order
  // Of the program, kept waiting by calls inside; 0: none.
  std::uint64_t overtaken_ STITCH_GUARDED_BY(mutex_) = 0;
  std::size_t overtaken_bytes_ STITCH_GUARDED_BY(mutex_) = 0;
  Clock::time_point overtaken_since_ STITCH_GUARDED_BY(mutex_);
  Clock::time_point held_until_ STITCH_GUARDED_BY(mutex_);
  bool holds_inside_ STITCH_GUARDED_BY(mutex_) = false;
  // Or it was, and what has waited inside meanwhile has not begun yet, though not for want of room.
  // While it is false, none that refuses is kept.
  bool held_back_ STITCH_GUARDED_BY(mutex_) = false;
  struct Hold {
    Clock::time_point since;
    Clock::time_point until;
    std::size_t bytes = 0;
    Clock::time_point overtaken_since;
  };
  std::array<Hold, kHolds> holds_ STITCH_GUARDED_BY(mutex_);  // the last ones, a ring
  std::size_t holds_made_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t one_way_calls_ STITCH_GUARDED_BY(mutex_) = 0;  // sent since the beginning
  std::uint64_t one_way_bytes_ STITCH_GUARDED_BY(mutex_) = 0;
  Handled one_way_inside_ STITCH_GUARDED_BY(mutex_);  // of these, up to the last one inside
  Handled returned_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t asked_for_ STITCH_GUARDED_BY(mutex_) = 0;  // 0: nothing
  std::uint64_t told_until_ STITCH_GUARDED_BY(mutex_) = 0;
};

// One request under way, until it is destroyed. Moved, not copied.
class FlowShare {
 public:
  FlowShare() = default;
  FlowShare(PeerFlow& flow, const PeerFlow::Size& size) noexcept : flow_(&flow), size_(size) {}
  FlowShare(FlowShare&& other) noexcept
      : flow_(std::exchange(other.flow_, nullptr)), size_(other.size_) {}
  FlowShare& operator=(FlowShare&& other) noexcept {
    if (this != &other) {
      end();
      flow_ = std::exchange(other.flow_, nullptr);
      size_ = other.size_;
    }
    return *this;
  }
  ~FlowShare() { end(); }
  void end() noexcept {
    if (flow_ != nullptr) std::exchange(flow_, nullptr)->end(size_);
  }
  explicit operator bool() const noexcept { return flow_ != nullptr; }

 private:
  PeerFlow* flow_ = nullptr;
  PeerFlow::Size size_;
};

}  // namespace stitch::rpc
