#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "stitch/rpc/options/options.h"
#include "stitch/rpc/world/member_record.h"
#include "stitch/transport/store/store.h"

namespace stitch::rpc {

// How the workers of a world find one another in a store. Each takes a slot (an atomic counter),
// writes its record under the slot and reads all records, so every worker sees a duplicate name or
// rank. Then each publishes its addresses and reads those of all. The last one to have read erases
// the keys: the store is ready for the next world, and only the epochs stay in it. Lives within
// join_world(). Thread contract: one thread. Every method throws Error(timeout) once
// Options::init_timeout has passed, and what the store throws.
class Rendezvous {
 public:
  // `hosts`: the store ends with this worker. Both references outlive this object.
  Rendezvous(const Options& options, transport::Store& store, bool hosts);

  // The records of all workers, by rank; `self` describes this one and gets its epoch here. Throws
  // when they do not form a world; then the workers that have arrived are told.
  [[nodiscard]] std::vector<MemberRecord> meet(MemberRecord self);
  // A random number that all workers of this world share.
  [[nodiscard]] std::uint64_t world_number();
  // The addresses of all workers, by rank.
  [[nodiscard]] std::vector<std::vector<std::string>> exchange_addresses(
      const std::vector<std::string>& own);
  // After everything has been read. True on the last worker, which has erased the keys.
  bool finish();

 private:
  [[nodiscard]] std::vector<std::string> read_all(const std::string& prefix);
  void tell_the_others(const std::vector<MemberRecord>& records);
  [[nodiscard]] transport::Store::Timeout left() const;
  [[nodiscard]] std::string arrived_names();
  void check(const std::vector<MemberRecord>& records) const;

  const Options& options_;
  transport::Store& store_;
  const bool hosts_;
  const std::chrono::steady_clock::time_point deadline_;
};

}  // namespace stitch::rpc
