// What a worker has written about itself into the store.
#include "stitch/rpc/world/member_record.h"

#include <string>

#include "tests/fuzz/targets.h"

namespace stitch::fuzz::member_records {

static bool run(Bytes input) {
  return accepts([&] {
    const rpc::MemberRecord record = rpc::MemberRecord::decode(text_of(input));
    // Nothing that was accepted changes on its way to the next worker.
    const std::string again = record.encode();
    require(rpc::MemberRecord::decode(again).encode() == again, "a member's record, written again");
  });
}

static Seeds seeds() {
  rpc::MemberRecord record;
  record.name = "ps0";
  record.rank = 1;
  record.world_size = 4;
  record.founders = 2;
  record.process = "100-pid:[1]-2";
  record.host = "host";
  record.memory = "memory";
  record.prefers_memory = true;
  Seeds list;
  list.push_back({"plain", bytes_of(record.encode())});
  record.devices.count = 2;
  record.devices.transfers = true;
  record.devices.maps.emplace("ps1", rpc::DeviceMap({{"cuda:0", "cuda:1"}, {"cpu", "cuda:0"}}));
  list.push_back({"devices", bytes_of(record.encode())});
  record.devices.maps.emplace("ps2",
                              rpc::DeviceMap({{"cuda:0", "cuda:1/bf16"}, {"cuda:1", "cpu/fp16"}}));
  list.push_back({"casts", bytes_of(record.encode())});
  return list;
}

}  // namespace stitch::fuzz::member_records

namespace stitch::fuzz {
const Target member_record{"member_record", member_records::run, member_records::seeds, 256};
}  // namespace stitch::fuzz
