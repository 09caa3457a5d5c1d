#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/rpc/world/member_record.h"

namespace stitch::rpc {

// The keys of a world in its store.
namespace world_key {
inline constexpr const char* kMember = "member/";  // claims, by token: MemberClaim
inline constexpr const char* kLeader = "leader";   // claim of the one that is to found it
inline constexpr const char* kKeeper = "keeper";   // claim of the one that has founded or keeps it
inline constexpr const char* kWorld = "world";     // WorldRecord: of a founding, then without lives
inline constexpr const char* kAnswer = "answer/";  // by token: WorldRecord for a worker that joins
}  // namespace world_key
// The value of the claim kKeeper: the world, and who keeps it.
[[nodiscard]] inline std::string keeper_value(std::uint64_t world, const std::string& worker) {
  return std::to_string(world) + " of " + worker;
}

// All values begin with a mark and the version of stitch's wire: two versions that meet say both.
// Throws Error(protocol) for another mark or version; `what` begins the text.
void write_mark(base::ByteWriter& out);
void read_mark(base::ByteReader& in, const std::string& what);

// What a worker claims its place with. A plain value.
struct MemberClaim {
  MemberRecord record;
  std::vector<std::string> addresses{};  // all that it has bound, best first

  [[nodiscard]] std::string encode() const;
  // Throws Error(protocol) when `text` is no claim.
  [[nodiscard]] static MemberClaim decode(const std::string& text);
};

// What the store says about a world, to the founders of one or to a worker that joins it: its
// workers, or why there is no place. A plain value.
struct WorldRecord {
  std::uint64_t number = 0;               // which all members of the world share
  std::vector<KnownLife> lives{};         // the last life of each worker, by id; empty: it runs
  std::string failure{};                  // why not, as to_refusal_text(); empty: no failure
  std::vector<std::string> failed_for{};  // the tokens of those concerned

  // The live worker with this token; null if there is none.
  [[nodiscard]] const MemberCard* find(const std::string& token) const;
  // The failure that concerns this token.
  [[nodiscard]] std::optional<Error> failure_of(const std::string& token) const;

  // Of lives that are over it has name, id, epoch and verdict, or, where that is too much for a
  // store, no verdict. Throws Error(protocol) for what decode() refuses.
  [[nodiscard]] std::string encode() const;
  // Throws Error(protocol) when `text` is no record.
  [[nodiscard]] static WorldRecord decode(const std::string& text);
};

}  // namespace stitch::rpc
