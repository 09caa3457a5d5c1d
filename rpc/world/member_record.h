#pragma once

#include <cstdint>
#include <string>

#include "stitch/rpc/gpu/device_map.h"
#include "stitch/rpc/message/peer_limits.h"
#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// Names of transports (Options::transports) that are chosen by where workers are.
inline constexpr const char* kLoopback = "loopback";
inline constexpr const char* kSharedMemory = "shm";

// What a worker says about itself when it claims its place in a world.
struct MemberRecord {
  static constexpr std::int64_t kNoRank = Options::kFromLauncher;

  std::string token;            // random: which process this is; of later ones, they are greater
  std::string name;             // empty: it is given one
  std::int64_t rank = kNoRank;  // kNoRank: it is given one
  WorldSize size{};             // that it expects
  std::string process;          // equal for workers of one process, and only for those
  std::string host;             // equal for workers that reach one another on 127.0.0.1
  std::string memory;           // equal for workers that can meet over shared memory; empty: cannot
  bool prefers_memory = false;  // to any transport but loopback within a process
  bool uses_loopback = true;    // within a process
  WorkerDevices devices{};
  PeerLimits limits{};  // those that it sets

  [[nodiscard]] std::string encode() const;
  // Throws Error(protocol) when `text` is not a record.
  [[nodiscard]] static MemberRecord decode(const std::string& text);
  // The token in the text of a record; empty when there is none.
  [[nodiscard]] static std::string token_of(const std::string& text);
};

// This worker's. Tries out shared memory where `options` allow it and other workers
// could share it.
[[nodiscard]] MemberRecord describe_this_worker(const Options& options, bool has_secret);

// Whether both run under one kernel, as far as their records say: those of virtual machines that
// were restored from one snapshot say so, too.
[[nodiscard]] bool on_same_host(const MemberRecord& self, const MemberRecord& other);

// Whether it is a loopback address of a host, "tcp://127.0.0.1:4711".
[[nodiscard]] bool is_host_address(const std::string& address);

// Whether `self` can connect to an address of `other`, as far as hosts and users decide.
[[nodiscard]] bool within_reach(const std::string& address, const MemberRecord& self,
                                const MemberRecord& other);

}  // namespace stitch::rpc
