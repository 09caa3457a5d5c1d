#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// What the store says about the world that runs, under the key `world`: who is a member and where.
// Written by the live worker with the lowest id (WorldKeeper), read by a worker that starts. An
// empty value under the key means that no world runs. A plain value.
struct WorldRecord {
  struct Entry {
    MemberCard card;   // of one that is not live: without addresses and record
    bool live = true;  // false: dead or left; its name keeps its id
  };
  std::uint64_t number = 0;  // which all members of the world share
  WorldSize size{};
  std::vector<Entry> entries;  // the last life of each worker that has been a member, by id

  [[nodiscard]] const Entry* find(const std::string& name) const;
  [[nodiscard]] const Entry* find(WorkerId id) const;
  [[nodiscard]] std::vector<std::string> live_names() const;

  [[nodiscard]] std::string encode() const;
  // Throws Error(protocol) when `text` is no record.
  [[nodiscard]] static WorldRecord decode(const std::string& text);
};

// The keys of a world in its store.
namespace world_key {
inline constexpr const char* kWorld = "world";            // the record
inline constexpr const char* kRing = "ring";              // counted up by a worker that starts
inline constexpr const char* kRung = "rung";              // the ring that the keeper saw last
inline constexpr const char* kGeneration = "generation";  // of foundings; see Rendezvous
inline constexpr const char* kOpen = "open";  // a tcp store: no world has come back to it
}  // namespace world_key

}  // namespace stitch::rpc
