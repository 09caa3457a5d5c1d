#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "stitch/base/byte_io.h"
#include "stitch/base/hash.h"

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
[[nodiscard]] inline std::string to_string(const RRefId& id) {
  return "rref " + std::to_string(id.owner.id) + "." + std::to_string(id.owner.epoch) + "/" +
         std::to_string(id.creator.id) + "." + std::to_string(id.creator.epoch) + "/" +
         std::to_string(id.k);
}

inline constexpr std::size_t kWireIdBytes = 32;

inline void write(base::ByteWriter& out, const RRefId& id) {
  out.write(id.owner.id);
  out.write(id.owner.epoch);
  out.write(id.creator.id);
  out.write(id.creator.epoch);
  out.write(id.k);
}

// Throws Error(protocol) when fewer than kWireIdBytes are left.
[[nodiscard]] inline RRefId read_rref_id(base::ByteReader& in) {
  RRefId id;
  id.owner.id = in.read<std::uint32_t>();
  id.owner.epoch = in.read<std::uint64_t>();
  id.creator.id = in.read<std::uint32_t>();
  id.creator.epoch = in.read<std::uint64_t>();
  id.k = in.read<std::uint64_t>();
  return id;
}

struct WorkerLifeHash {
  std::size_t operator()(const WorkerLife& life) const noexcept {
    return base::hash_of(life.epoch, life.id);
  }
};
// One round of mixing for all fields: tables of references are looked into several times for each.
struct RRefIdHash {
  std::size_t operator()(const RRefId& id) const noexcept {
    return static_cast<std::size_t>(base::mix_bits(
        id.k + id.owner.epoch * 0x9e3779b97f4a7c15U + id.owner.id * 0xbf58476d1ce4e5b9U +
        id.creator.epoch * 0x94d049bb133111ebU + id.creator.id * 0xd6e8feb86659fd93U));
  }
};

}  // namespace stitch::rref
