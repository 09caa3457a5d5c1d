#include "stitch/rpc/world/member_record.h"

#include <cstdlib>
#include <string>

#include "stitch/base/error.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

// The input: what a worker has written about itself into the store.
bool run(Bytes input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    const rpc::MemberRecord record = rpc::MemberRecord::decode(text);
    // Nothing that was accepted changes on its way to the next worker.
    const std::string again = record.encode();
    if (rpc::MemberRecord::decode(again).encode() != again) std::abort();
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::vector<base::Bytes> seeds() {
  rpc::MemberRecord record;
  record.name = "ps0";
  record.rank = 1;
  record.world_size = 4;
  record.epoch = 3;
  record.process = "100-pid:[1]-2";
  record.host = "host";
  record.memory = "memory";
  record.prefers_memory = true;
  std::vector<base::Bytes> list;
  list.push_back(bytes_of(record.encode()));
  record.devices.count = 2;
  record.devices.maps.emplace("ps1", rpc::DeviceMap({{"cuda:0", "cuda:1"}, {"cpu", "cuda:0"}}));
  list.push_back(bytes_of(record.encode()));
  return list;
}

}  // namespace

const Target member_record{"member_record", run, seeds};

}  // namespace stitch::fuzz
