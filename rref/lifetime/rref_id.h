#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

namespace stitch::base {
class ByteReader;
class ByteWriter;
}  // namespace stitch::base

namespace stitch::rref {

// One life of a worker: a worker that joins again under its name and id has a new epoch and shares
// no state with the earlier one. Without padding: ids are kept a million at a time.
struct [[gnu::packed, gnu::aligned(4)]] WorkerLife {
  std::uint32_t id = 0;
  std::uint64_t epoch = 0;
  friend bool operator==(const WorkerLife&, const WorkerLife&) = default;
  friend auto operator<=>(const WorkerLife&, const WorkerLife&) = default;
};

// The globally unique id of one remote object, never reused (G6): the k-th that `creator` made at
// `owner`.
struct RRefId {
  WorkerLife owner;
  WorkerLife creator;
  std::uint64_t k = 0;  // from 0, without gaps except for creations that never left
  friend bool operator==(const RRefId&, const RRefId&) = default;
  friend auto operator<=>(const RRefId&, const RRefId&) = default;
};
static_assert(sizeof(RRefId) == 32);

// "rref 7.1/3.1/42": owner id and epoch, creator id and epoch, k.
[[nodiscard]] std::string to_string(const RRefId& id);

inline constexpr std::size_t kWireIdBytes = 32;
void write(base::ByteWriter& out, const RRefId& id);
// Throws Error(protocol) when fewer than kWireIdBytes are left.
[[nodiscard]] RRefId read_rref_id(base::ByteReader& in);

struct WorkerLifeHash {
  std::size_t operator()(const WorkerLife& life) const noexcept;
};
struct RRefIdHash {
  std::size_t operator()(const RRefId& id) const noexcept;
};

}  // namespace stitch::rref
