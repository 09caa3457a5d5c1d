#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// What has become of one life of a worker. Only `alive` changes.
enum class LifeState : std::uint8_t { alive = 0, dead = 1, left = 2 };

// A life, as one member tells it to another.
struct KnownLife {
  static constexpr std::size_t kMaxVerdict = 512;
  MemberCard card;
  LifeState state = LifeState::alive;
  std::string verdict{};  // of a dead one: who declared it dead, and why; cut at kMaxVerdict
  friend bool operator==(const KnownLife&, const KnownLife&) = default;
};

// The body of a frame of membership (wire::kMembership). PROTOCOL.md has its layout. A plain value.
struct Notice {
  enum class Step : std::uint8_t {
    suspect = 1,  // `about` cannot be reached from here: decide
    alive,        // the one that decides can reach `about`
    dead,         // `about` was declared dead by `by`, for `text`
    member,       // `lives[0]` is a member from now on
    known,        // answers member: taken in
    left,         // `about` has left
    list,         // `lives` is all that the sender knows
  };
  Step step = Step::suspect;
  WorkerInfo about{};
  WorkerInfo by{};
  std::string text{};
  std::vector<KnownLife> lives{};

  void write(base::Bytes& out) const;
  // Throws Error(protocol) for anything else.
  [[nodiscard]] static Notice read(std::span<const std::byte> bytes);
  friend bool operator==(const Notice&, const Notice&) = default;
};

// Why a worker cannot be a member, as a text in the store, and back: with the code
// in front where that is `already_exists`. Any other is read as `invalid_argument`.
[[nodiscard]] std::string to_refusal_text(const Error& why);
[[nodiscard]] Error from_refusal_text(const std::string& text);

}  // namespace stitch::rpc
