// Sections of transfers that make no sense are refused before anything is asked for: as bytes, and
// as part of a message, whose connection they end. Over the double of CUDA and NCCL.
#include "tests/gpu/added_sections.h"
#include "tests/support/world_test.h"

namespace transfer_section_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;
using stitch::rpc::TransferSection;

const c10::Device kThere(c10::kCUDA, 1);

// Two transfers, whose tensors alternate; the second has two.
TransferSection sound() {
  TransferSection section;
  section.transfers = {{7, 4000, kThere}, {8, 1024, kThere}};
  section.tensors = {{0, at::kFloat, true, {2, 3}, {3, 1}, 1, 0},
                     {2, at::kFloat, false, {10, 100}, {1, 10}, 0, 0},
                     {3, at::kHalf, false, {5, 4}, {0, 2}, 1, 256}};
  return section;
}
Error refusal(const std::function<void(TransferSection&)>& change) {
  TransferSection section = sound();
  change(section);
  const auto bytes = section.encode();
  return error_of([&] { static_cast<void>(TransferSection::decode(bytes.span())); });
}

TEST(TransferSections, GoThereAndBack) {
  const auto bytes = sound().encode();
  const TransferSection read = TransferSection::decode(bytes.span());
  ASSERT_EQ(read.transfers.size(), 2u);
  EXPECT_EQ(read.transfers[1].id, 8u);
  EXPECT_EQ(read.transfers[1].bytes, 1024u);
  EXPECT_EQ(read.transfers[1].to, kThere);
  ASSERT_EQ(read.tensors.size(), 3u);
  EXPECT_TRUE(read.tensors[0].requires_grad);
  EXPECT_EQ(read.tensors[2].dtype, at::kHalf);
  EXPECT_EQ(read.tensors[2].sizes, (std::vector<std::int64_t>{5, 4}));
  EXPECT_EQ(read.tensors[2].strides, (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(read.tensors[2].transfer, 1u);
  EXPECT_EQ(read.tensors[2].offset, 256u);
}

TEST(TransferSections, ThatMakeNoSenseAreRefused) {
  using Change = std::function<void(TransferSection&)>;
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  const std::vector<std::pair<Change, const char*>> cases{
      {[](auto& s) { s.transfers.clear(); }, "names none"},
      {[](auto& s) { s.transfers[0].id = 0; }, "has transfer 0"},
      {[](auto& s) { s.transfers[0].bytes = 0; }, "of 0 bytes"},
      {[](auto& s) { s.transfers[0].bytes = ~std::uint64_t{0}; }, "has transfer 7"},
      {[](auto& s) { s.transfers[0].to = c10::Device(c10::kCPU); }, "to cpu"},
      {[](auto& s) {
         s.transfers.push_back({9, 8, kThere});
       },
       "transfer 2, which has no tensor"},
      {[](auto& s) { s.transfers[0].bytes = 3999; }, "no room"},
      {[](auto& s) { s.tensors[1].tensor = 0; }, "in no order"},
      {[](auto& s) { s.tensors[1].transfer = 2; }, "no room"},
      {[](auto& s) { s.tensors[1].offset = 4; }, "no room"},
      {[](auto& s) { s.tensors[2].offset = 22; }, "no room"},  // behind the bytes of another
      {[](auto& s) { s.tensors[2].offset = 257; }, "no room"},
      {[](auto& s) { s.tensors[2].offset = ~std::uint64_t{1}; }, "no room"},
      {[](auto& s) { s.tensors[1].sizes[0] = 0; }, "of size 0"},
      {[](auto& s) { s.tensors[1].sizes[0] = -1; }, "of size -1"},
      {[](auto& s) { s.tensors[1].strides[0] = -1; }, "stride -1"},
      {[](auto& s) { s.tensors[1].sizes[0] = kHuge; }, "overflow"},
      {[](auto& s) { s.tensors[1].strides[0] = kHuge; }, "overflow"},
      {[](auto& s) {
         s.tensors[2].sizes = {kHuge, 1024};
       },
       "overflow"},  // of no bytes
      {[](auto& s) {
         s.tensors[1].sizes.assign(65, 1);
         s.tensors[1].strides.assign(65, 1);
       },
       "65 dimensions"},
      {[](auto& s) {
         s.tensors[1].sizes.assign(29, 2);
         s.tensors[1].strides.assign(29, 1);
       },
       "overlap"},
      {[](auto& s) {
         s.tensors[1].dtype = at::kInt;
         s.tensors[1].requires_grad = true;
       },
       "gradients of an integer tensor"},
  };
  for (const auto& [change, text] : cases) {
    const Error error = refusal(change);
    EXPECT_EQ(error.code(), ErrorCode::protocol) << text;
    EXPECT_TRUE(contains(error.what(), text)) << text << " is not in: " << error.what();
  }
}

// ---- in messages

std::int64_t size(const std::vector<at::Tensor>& tensors) {
  return static_cast<std::int64_t>(tensors.size());
}

// Beside an empty section of devices.
std::vector<Section> with_devices(const TransferSection& section) {
  const auto bytes = section.encode();
  return {{stitch::rpc::wire::kDevices, std::vector<std::byte>(4)},  // a count of 0
          {stitch::rpc::wire::kTransfers, {bytes.data(), bytes.data() + bytes.size()}}};
}

// Why worker 1 lost worker 0, which sent it that.
std::string loss_by(const TransferSection& section) {
  Cluster cluster(3);
  const std::string why = stitch::testing::loss_by(cluster, with_devices(section), [] {
    static_cast<void>(
        rpc_sync<size>({.to = "worker1", .timeout = std::chrono::seconds(20)},
                       std::vector{at::ones(2), at::Tensor(), at::Tensor(), at::Tensor()}));
  });
  EXPECT_EQ(cluster[2].rpc_sync<size>("worker1", std::vector{at::ones(2)}), 1);
  EXPECT_TRUE(
      eventually([&] { return cluster[1].debug_info().at("gpu.transfers_receiving") == 0; }));
  static_cast<void>(cluster.shutdown());  // the two have lost each other
  return why;
}

TEST(HostileTransfers, ASectionThatMakesNoSenseEndsItsConnectionAndNoOther) {
  TransferSection section = sound();
  section.tensors[1].offset = 4;
  EXPECT_TRUE(contains(loss_by(section), "no room"));
  section = sound();
  section.transfers[1].id = 7;  // twice
  EXPECT_TRUE(contains(loss_by(section), "received a second time"));
}

TEST(HostileTransfers, ToADeviceThatIsNotHereFailItsCallAlone) {
  Cluster cluster(2);
  TransferSection section = sound();
  section.transfers[1].to = c10::Device(c10::kCUDA, 9);
  const auto error = error_of([&] {
    const AddedSections added(with_devices(section));
    static_cast<void>(
        rpc_sync<size>({.to = "worker1", .timeout = std::chrono::seconds(20)},
                       std::vector{at::Tensor(), at::ones(2), at::Tensor(), at::Tensor()}));
  });
  EXPECT_TRUE(has_text(
      error, ErrorCode::invalid_argument,
      "a transfer of 1024 bytes is for device cuda:9 of worker \"worker1\", which has the CPU and "
      "4 CUDA devices"));
  EXPECT_EQ(rpc_sync<size>("worker1", std::vector{at::ones(2)}), 1);
  EXPECT_FALSE(cluster[1].agent()->peers().lost(WorkerId(0)).has_value());
}

// The bytes are never sent, and no other call waits for them.
TEST(HostileTransfers, ATransferThatNeverComesHoldsBackOnlyItsCall) {
  Cluster cluster(3);
  TransferSection section = sound();
  section.transfers[0].bytes = std::uint64_t{1} << 60;
  const auto error = error_of([&] {
    const AddedSections added(with_devices(section));
    static_cast<void>(
        rpc_sync<size>({.to = "worker1", .timeout = std::chrono::milliseconds(300)},
                       std::vector{at::Tensor(), at::ones(2), at::Tensor(), at::Tensor()}));
  });
  EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
  EXPECT_EQ(cluster[2].rpc_sync<size>("worker1", std::vector{at::ones(2)}), 1);
  EXPECT_EQ(rpc_sync<size>("worker1", std::vector{at::ones(2)}), 1);
  // What worker 1 waits for ends with the life of worker 0.
  EXPECT_EQ(cluster[1].debug_info().at("gpu.transfers_receiving"), 2);
  cluster[0].shutdown({.graceful = false});
  EXPECT_TRUE(
      eventually([&] { return cluster[1].debug_info().at("gpu.transfers_receiving") == 0; }));
  static_cast<void>(cluster.shutdown());
}

}  // namespace
}  // namespace transfer_section_test
