// What workers read in the store of their world: the claim of another one, and the record of a
// world.
#include "stitch/rpc/world/world_record.h"

#include <string>

#include "tests/fuzz/targets.h"

namespace stitch::fuzz::member_records {

// Nothing that was accepted changes on its way to the next worker.
static bool run_claim(const std::string& text) {
  return accepts([&] {
    const auto claim = rpc::MemberClaim::decode(text);
    const std::string again = claim.encode();
    require(rpc::MemberClaim::decode(again).encode() == again, "a claim, written again");
    require(rpc::MemberRecord::token_of(claim.record.encode()) == claim.record.token,
            "the token of a claim is another");
  });
}

static bool run_world(const std::string& text) {
  return accepts([&] {
    const auto world = rpc::WorldRecord::decode(text);
    const std::string again = world.encode();
    require(rpc::WorldRecord::decode(again).encode() == again, "the record of a world, again");
    for (const auto& token : world.failed_for)
      require(world.failure_of(token).has_value(), "a failure does not concern its worker");
  });
}

static bool run(Bytes input) {
  const std::string text = text_of(input);
  const bool claim = run_claim(text);
  const bool world = run_world(text);
  return claim || world;
}

static Seeds seeds() {
  rpc::MemberClaim claim;
  rpc::MemberRecord& record = claim.record;
  record.token = "0123456789abcdef";
  record.name = "ps0";
  record.rank = 1;
  record.size = WorldSize("2:4");
  claim.addresses = {"loopback:1", "tcp://127.0.0.1:4711"};
  record.process = "100-pid:[1]-2";
  record.host = "host";
  record.memory = "memory";
  record.prefers_memory = true;
  Seeds list;
  list.push_back({"plain", bytes_of(claim.encode())});
  record.devices.count = 2;
  record.devices.transfers = true;
  record.devices.maps.emplace("ps1", rpc::DeviceMap({{"cuda:0", "cuda:1"}, {"cpu", "cuda:0"}}));
  list.push_back({"devices", bytes_of(claim.encode())});
  record.devices.maps.emplace("ps2",
                              rpc::DeviceMap({{"cuda:0", "cuda:1/bf16"}, {"cuda:1", "cpu/fp16"}}));
  list.push_back({"casts", bytes_of(claim.encode())});
  rpc::WorldRecord world{42, {{{{"ps0", WorkerId(0), 1}, {"shm://x"}, record.encode()}}}};
  world.lives.push_back({{{"ps1", WorkerId(1), 7}, {}, {}}, rpc::LifeState::dead, "killed"});
  list.push_back({"world", bytes_of(world.encode())});
  world.failure = "rank 0 is taken twice";
  world.failed_for = {"0123456789abcdef"};
  list.push_back({"failure", bytes_of(world.encode())});
  return list;
}

}  // namespace stitch::fuzz::member_records

namespace stitch::fuzz {
const Target member_record{"member_record", member_records::run, member_records::seeds, 256};
}  // namespace stitch::fuzz
