#include "stitch/transport/selection/interfaces.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::interfaces_test {
namespace {

const std::vector<Interface> kHost{
    {"lo", "127.0.0.1", true, true},
    {"lo", "::1", true, true},
    {"docker0", "172.17.0.1", true, false},
    {"eth0", "fe80::1", true, false},
    {"eth0", "2001:db8::7", true, false},
    {"eth0", "10.0.0.7", true, false},
    {"eth01", "10.1.0.7", true, false},
    {"eth2", "169.254.3.4", true, false},
    {"ib0", "10.9.0.7", false, false},
    {"ib1", "10.9.1.7", true, false},
    {"wg0", "", true, false},
};

struct Row {
  const char* wanted;
  bool loopback_world;
  const char* chosen;
};

class ChooseAddress : public ::testing::TestWithParam<Row> {};

TEST_P(ChooseAddress, PicksTheInterfaceThatPeersReach) {
  EXPECT_EQ(choose_address(kHost, GetParam().wanted, GetParam().loopback_world), GetParam().chosen);
}

INSTANTIATE_TEST_SUITE_P(
    Table, ChooseAddress,
    ::testing::Values(Row{"", true, "127.0.0.1"},  // one host: loopback
                      Row{"", false,
                          "10.0.0.7"},  // several: neither loopback nor docker, IPv4 first
                      Row{"eth", false, "10.0.0.7"},     // a prefix
                      Row{"eth01", false, "10.1.0.7"},   //
                      Row{"=eth0", false, "10.0.0.7"},   // exact
                      Row{"=eth01", false, "10.1.0.7"},  //
                      Row{"ib,eth", false, "10.9.1.7"},  // in the order of the list; ib0 is down
                      Row{" eth01 , ib", false, "10.1.0.7"},  // blanks
                      Row{"ib0,eth", false, "10.0.0.7"},      // down: the next wanted one
                      Row{"docker", false, "172.17.0.1"},     // wanted by name
                      Row{"^eth", false, "10.9.1.7"},         // all but
                      Row{"^eth,ib", false, "172.17.0.1"},    // the ^ holds for the list
                      Row{"^=eth0", false, "10.1.0.7"},       //
                      Row{"eth,^=eth0", false, "10.1.0.7"},   // both
                      Row{"eth", true, "10.0.0.7"},           // one host, but another one is wanted
                      Row{"lo", true, "127.0.0.1"},           //
                      Row{"^docker", true, "127.0.0.1"},      // allows loopback
                      Row{"^lo,docker", true, "10.0.0.7"}));  // excludes it

TEST(ChooseAddressErrors, NameTheReasonForEachInterface) {
  const Error error = stitch::testing::error_of([&] {
    (void)choose_address({{"lo", "127.0.0.1", true, true},
                          {"eth0", "10.0.0.7", true, false},
                          {"ib0", "10.9.0.7", false, false},
                          {"ib1", "169.254.0.1", true, false},
                          {"ib2", "", true, false}},
                         "ib,lo", false);
  });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(),
               "address to listen on cannot be chosen among the wanted interfaces \"ib,lo\": lo "
               "127.0.0.1 is loopback, which other hosts "
               "cannot reach; eth0 10.0.0.7 is not wanted; ib0 10.9.0.7 is down; ib1 169.254.0.1 "
               "is link-local; ib2 has no address");
  EXPECT_STREQ(stitch::testing::error_of([] { (void)choose_address({}, "", false); }).what(),
               "address to listen on cannot be chosen: this host has no network interface");
}

TEST(ChooseAddressErrors, LoopbackIsNeverAdvertisedToOtherHosts) {
  EXPECT_THROW((void)choose_address({{"lo", "127.0.0.1", true, true}}, "", false), Error);
  EXPECT_EQ(choose_address({}, "", true), "127.0.0.1");
}

TEST(ListInterfaces, FindsLoopbackHere) {
  const auto interfaces = list_interfaces();
  EXPECT_TRUE(std::any_of(interfaces.begin(), interfaces.end(), [](const Interface& each) {
    return each.loopback && each.address == "127.0.0.1";
  }));
}

TEST(WantedInterfaces, OursComesBeforeTheOthers) {
  for (const char* name :
       {"STITCH_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"})
    ::unsetenv(name);
  EXPECT_EQ(wanted_interfaces_from_environment().names, "");
  ::setenv("TP_SOCKET_IFNAME", "tp", 1);
  EXPECT_EQ(wanted_interfaces_from_environment().names, "tp");
  ::setenv("GLOO_SOCKET_IFNAME", "gloo", 1);
  EXPECT_EQ(wanted_interfaces_from_environment().names, "gloo");
  ::setenv("NCCL_SOCKET_IFNAME", "nccl", 1);
  EXPECT_EQ(wanted_interfaces_from_environment().names, "nccl");
  ::setenv("STITCH_SOCKET_IFNAME", "", 1);
  EXPECT_EQ(wanted_interfaces_from_environment().names, "nccl");
  ::setenv("STITCH_SOCKET_IFNAME", "stitch", 1);
  EXPECT_EQ(wanted_interfaces_from_environment().names, "stitch");
  EXPECT_EQ(wanted_interfaces_from_environment().variable, "STITCH_SOCKET_IFNAME");
}

}  // namespace
}  // namespace stitch::transport::interfaces_test
