// Sections of devices that make no sense: each ends its connection with `protocol`, and nothing
// else. One that names a device that is not here fails its call alone. Over the double of CUDA.
#include <initializer_list>
#include <span>

#include "tests/gpu/added_sections.h"
#include "tests/support/world_test.h"

namespace placement_hostile_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing;
using stitch::rpc_sync;
using Bytes = std::vector<std::uint8_t>;

std::int64_t dimensions(const std::vector<at::Tensor>& tensors) {
  return static_cast<std::int64_t>(tensors.size());
}

// u32 count, then for each: u32 tensor, u8 type and index here, u8 type and index there.
Bytes section(std::initializer_list<Bytes> entries) {
  Bytes bytes{static_cast<std::uint8_t>(entries.size()), 0, 0, 0};
  for (const auto& entry : entries) bytes.insert(bytes.end(), entry.begin(), entry.end());
  return bytes;
}

std::vector<Section> of_devices(const Bytes& bytes) {
  const auto all = std::as_bytes(std::span(bytes));
  return {{stitch::rpc::wire::kDevices, {all.begin(), all.end()}}};
}

// Calls worker 1 with the section; why worker 1 then lost worker 0.
std::string refusal_of(const Bytes& bytes) {
  Cluster cluster(2);
  const std::string why = stitch::testing::loss_by(cluster, of_devices(bytes), [] {
    static_cast<void>(rpc_sync<dimensions>("worker1", std::vector{at::ones(2), at::Tensor()}));
  });
  static_cast<void>(cluster.shutdown());  // the two have lost each other
  return why;
}

TEST(HostileDevices, ASectionThatMakesSenseIsTaken) {
  Cluster cluster(2);
  // From a device there to the CPU here.
  const AddedSections added(of_devices(section({{0, 0, 0, 0, 0, 0, 1, 0}})));
  EXPECT_EQ(rpc_sync<dimensions>("worker1", std::vector{at::ones(2), at::Tensor()}), 2);
}

TEST(HostileDevices, ASectionThatMakesNoSenseEndsItsConnection) {
  const std::vector<std::pair<Bytes, const char*>> cases{
      {section({{0, 0, 0, 0, 1, 200, 0, 0}}), "names device 200 of type 1"},
      {section({{0, 0, 0, 0, 7, 0, 0, 0}}), "names device 0 of type 7"},
      {section({{0, 0, 0, 0, 0, 1, 0, 0}}), "names device 1 of type 0"},
      {section({{0, 0, 0, 0, 0, 0, 9, 0}}), "names device 0 of type 9"},
      {section({{1, 0, 0, 0, 1, 0, 0, 0}}), "names tensor 1 of 2, or one that is undefined"},
      {section({{2, 0, 0, 0, 1, 0, 0, 0}}), "names tensor 2 of 2"},
      {section({{0, 0, 0, 0, 1, 0, 0, 0}, {0, 0, 0, 0, 1, 1, 0, 0}}), "in no order"},
      // Whatever devices there are.
      {section({{0, 0, 0, 0, 1, 9, 0, 0}, {2, 0, 0, 0, 1, 0, 0, 0}}), "names tensor 2 of 2"},
      {section({{0, 0, 0, 0, 0, 0, 129, 0}}), "has tensor 0 cast from CPUFloatType"},
      {section({{0, 0, 0, 0, 1, 0, 128, 0}}), "has tensor 0 cast from CPUFloatType"},
      {section({{0, 0, 0, 0, 129, 0, 1, 0}}), "names device 0 of type 129"},
      {section({{0, 0, 0, 0, 0, 0, 130, 0}}), "names device 0 of type 2"},
      {{255, 255, 255, 255}, "announces 4294967295 items"},
      {{0, 0}, "section of devices"},
      {{0, 0, 0, 0, 1}, "section of devices"},
  };
  for (const auto& [bytes, text] : cases) {
    const std::string why = refusal_of(bytes);
    EXPECT_TRUE(contains(why, text)) << text << " is not in: " << why;
  }
}

TEST(HostileDevices, ADeviceThatIsNotHereFailsItsCallAlone) {
  Cluster cluster(2);
  for (int i = 0; i < 3; ++i) {
    const auto error = error_of([] {
      const AddedSections added(of_devices(section({{0, 0, 0, 0, 1, 9, 0, 0}})));
      static_cast<void>(rpc_sync<dimensions>("worker1", std::vector{at::ones(2), at::Tensor()}));
    });
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                         "tensor 1 of 2 is for device cuda:9 of worker \"worker1\", which has the "
                         "CPU and 4 CUDA devices"));
    EXPECT_EQ(rpc_sync<dimensions>("worker1", std::vector{at::ones(2)}), 1);
  }
  EXPECT_FALSE(cluster[1].agent()->peers().lost(WorkerId(0)).has_value());
}

}  // namespace
}  // namespace placement_hostile_test
