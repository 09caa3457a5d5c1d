#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/option_name.h"
#include "stitch/rpc/options/security_options.h"
#include "tests/support/world_test.h"

namespace options_test {
namespace {

using namespace stitch::testing;
using Environment = std::map<std::string, std::string>;

// Sets variables for a test and takes them away again.
class Variables {
 public:
  explicit Variables(Environment values) : values_(std::move(values)) {
    for (const auto& [name, value] : values_) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const auto& [name, value] : values_) unsetenv(name.c_str());
  }

 private:
  Environment values_;
};

std::string error_with(Environment variables, Options options = {.rank = 0, .world_size = 1}) {
  const Variables scope(std::move(variables));
  try {
    static_cast<void>(stitch::resolve_options(options));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "no error";
}

TEST(Options, ComeFromTheEnvironment) {
  const Variables scope({{"STITCH_NAME", "ps0"},
                         {"STITCH_RANK", "1"},
                         {"STITCH_WORLD_SIZE", "4"},
                         {"STITCH_RPC_TIMEOUT", "250ms"},
                         {"STITCH_SHUTDOWN_TIMEOUT", "2m"},
                         {"STITCH_STOP_ON_SIGNALS", "1"},
                         {"STITCH_RECONNECT_TIMEOUT", "5s"},
                         {"STITCH_NUM_THREADS", "3"},
                         {"STITCH_TRANSPORTS", "tcp,shm"},
                         {"STITCH_SECRET", "x"},
                         {"STITCH_MAX_FRAME_BYTES", "1MiB"},
                         {"STITCH_INLINE_BYTES", "4KiB"},
                         {"STITCH_INIT_METHOD", "file:///tmp/x"}});
  const auto options = stitch::resolve_options({});
  EXPECT_EQ(options.name, "ps0");
  EXPECT_EQ(options.rank, 1);
  EXPECT_EQ(options.world_size, 4);
  EXPECT_EQ(options.rpc_timeout, 250ms);
  EXPECT_EQ(options.shutdown_timeout, 2min);
  EXPECT_TRUE(options.stop_on_signals);
  EXPECT_EQ(options.reconnect_timeout, 5s);
  EXPECT_EQ(options.num_threads, 3);
  EXPECT_EQ(options.transports, (std::vector<std::string>{"tcp", "shm"}));
  EXPECT_EQ(options.max_frame_bytes, std::size_t{1} << 20);
  EXPECT_EQ(options.inline_bytes, 4096U);
}

TEST(Options, HaveDefaults) {
  const auto options =
      stitch::resolve_options({.rank = 3, .world_size = 4, .init_method = "file:///tmp/x"});
  EXPECT_EQ(options.name, "worker3");
  EXPECT_EQ(options.rpc_timeout, 60s);
  EXPECT_EQ(options.shutdown_timeout, 30s);
  EXPECT_EQ(options.reconnect_timeout, 10s);
  EXPECT_EQ(options.heartbeat_timeout, 10s);
  EXPECT_GE(options.num_threads, 2);
}

// Each option with a value that makes no sense, as a variable and, where one can be set, as a
// field.
TEST(Options, ErrorsNameWhatWasSet) {
  using Set = std::function<void(Options&)>;
  struct Option {
    std::string field;
    std::string value;  // of the variable
    Set set{};
    Environment beside{};
  };
  const auto negative = [](std::chrono::nanoseconds Options::*member) -> Set {
    return [=](Options& options) { options.*member = -1s; };
  };
  using O = Options;
  const std::vector<Option> table{
      {"name", "a b", [](O& o) { o.name = "a b"; }},
      {"rank", "7", [](O& o) { o.rank = 7; }},
      {"world_size", "0", [](O& o) { o.world_size = 0; }},
      {"init_method", "http://x", [](O& o) { o.init_method = "http://x"; }},
      {"rpc_timeout", "soon", negative(&O::rpc_timeout)},
      {"init_timeout", "-1s", negative(&O::init_timeout)},
      {"shutdown_timeout", "1y", negative(&O::shutdown_timeout)},
      {"stop_on_signals", "yes"},
      {"heartbeat_timeout", "1ms", [](O& o) { o.heartbeat_timeout = 1ms; }},
      {"reconnect_timeout", "never", negative(&O::reconnect_timeout)},
      {"num_threads", "-1", [](O& o) { o.num_threads = -1; }},
      {"transports", "tcp,shn",
       [](O& o) {
         o.transports = {"tcp", "shn"};
       }},
      {"transports", "uv", [](O& o) { o.transports = {"uv"}; }, {{"STITCH_SECRET", "s"}}},
      {"channels", "cme", [](O& o) { o.channels = {"cme"}; }},
      {"inline_bytes", "2MiB", [](O& o) { o.inline_bytes = 2 << 20; }},
      {"receive_pool_bytes", "much"},
      {"device_maps", "ps0:cuda:0=gpu", [](O& o) { o.device_maps["ps0"]["cuda:0"] = "gpu"; }},
      {"gpu_paths", "ncl", [](O& o) { o.gpu_paths = {"ncl"}; }},
      {"secret", " ", [](O& o) { o.secret = " "; }},
      {"secret", "", [](O& o) { o.secret = ""; }},
      {"secret_file", "/nowhere"},
      {"encryption", "yes"},
      {"encryption", "on", [](O& o) { o.encryption = "on"; }},  // without a secret
      {"max_frame_bytes", "1", [](O& o) { o.max_frame_bytes = 1; }},
      {"max_inflight_bytes", "0", [](O& o) { o.max_inflight_bytes = 0; }},
      {"max_inflight_calls", "0", [](O& o) { o.max_inflight_calls = 0; }},
      {"fault", "drop=2", [](O& o) { o.fault = "drop=2"; }},
      {"insecure", "yes"},
      // Used when a worker starts.
      {"dump_dir", "/dev/null/x", [](O& o) { o.dump_dir = "/dev/null/x"; }},
      {"socket_ifname", "=nowhere"},
  };
  const auto error = [](const Environment& variables, O options) {
    const Variables scope(variables);
    if (options.rank == O::kFromLauncher && !variables.contains("STITCH_RANK")) options.rank = 0;
    const bool listens = variables.contains("STITCH_SOCKET_IFNAME");
    if (listens) options.store = stitch::transport::make_hash_store();
    if (!options.world_size.is_set() && !variables.contains("STITCH_WORLD_SIZE"))
      options.world_size = listens ? "1:" : "1";
    return std::string(error_of([&] { static_cast<void>(stitch::init(options)); }).what());
  };
  std::set<std::string> covered;
  for (const auto& option : table) {
    std::string variable = "STITCH_";
    for (const char c : option.field) variable += static_cast<char>(std::toupper(c));
    covered.insert(variable);
    auto variables = option.beside;
    variables[variable] = option.value;
    const std::string by_variable = error(variables, {});
    EXPECT_TRUE(by_variable.starts_with(variable)) << by_variable;
    if (!option.set) continue;
    Options options;
    option.set(options);
    const std::string by_field = error(option.beside, options);
    EXPECT_TRUE(by_field.starts_with(option.field)) << by_field;
    // The field counts more.
    variables[variable] = option.field == "transports" ? "tcp" : option.value;
    const std::string by_both = error(variables, options);
    const bool read_first = option.field == "secret";
    EXPECT_TRUE(by_both.starts_with(read_first ? variable : option.field)) << by_both;
  }
  // Each variable that there is.
  covered.insert("STITCH_JOB");  // any text
  const auto known = stitch::rpc::known_variables();
  EXPECT_EQ(covered, std::set<std::string>(known.begin(), known.end()));
}

TEST(Options, UnknownVariablesAreErrorsWithAHint) {
  EXPECT_EQ(error_with({{"STITCH_RPC_TIMOUT", "5s"}}),
            "variable STITCH_RPC_TIMOUT is unknown; did you mean STITCH_RPC_TIMEOUT?");
  EXPECT_EQ(error_with({{"STITCH_NAMES", "a"}}),
            "variable STITCH_NAMES is unknown; did you mean STITCH_NAME?");
}

// Kubernetes sets the first three for a service that is called "stitch".
TEST(Options, UnknownVariablesThatAreLikeNoneAreIgnoredAndSaidOnce) {
  for (const char* name :
       {"STITCH_SERVICE_HOST", "STITCH_PORT", "STITCH_PORT_29500_TCP_ADDR", "STITCH_VERBOSITY"}) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(error_with({{name, "tcp://10.0.0.6:29500"}}), "no error");
    EXPECT_EQ(error_with({{name, "tcp://10.0.0.6:29500"}}), "no error");
    EXPECT_EQ(testing::internal::GetCapturedStderr(),
              "stitch: variable " + std::string(name) + " is unknown, and ignored\n");
  }
}

TEST(Options, BadValuesAreNamed) {
  EXPECT_EQ(error_with({{"STITCH_RPC_TIMEOUT", "soon"}}),
            "STITCH_RPC_TIMEOUT is \"soon\"; allowed: a duration such as 500ms, 5s, 2m, 0");
  EXPECT_EQ(error_with({{"STITCH_STOP_ON_SIGNALS", "yes"}}),
            "STITCH_STOP_ON_SIGNALS is \"yes\"; allowed: 0, 1");
  EXPECT_EQ(error_with({{"STITCH_NUM_THREADS", "-1"}}),
            "STITCH_NUM_THREADS is \"-1\"; allowed: a number from 0 on");
  EXPECT_EQ(error_with({}, {.name = "a b", .rank = 0, .world_size = 1}),
            "name is \"a b\"; allowed: 1 to 127 of letters, digits, '-', '_', ':', '.'");
  EXPECT_EQ(error_with({}, {.rank = 2, .world_size = 2}),
            "rank 2 does not fit a world of 2; ranks are 0 to world_size - 1");
  EXPECT_EQ(error_with({}, {.rank = 0, .world_size = 2, .init_method = "http://x"}),
            "init_method is \"http://x\"; allowed: env://, tcp://host:port, c10d://host:port, "
            "file:///path; did you "
            "mean tcp://?");
  EXPECT_EQ(error_with({}, {.rank = 0, .world_size = 2, .init_method = "file://tmp/meet"}),
            "init_method is \"file://tmp/meet\": write file:///tmp/meet");
  EXPECT_EQ(
      error_with({{"STITCH_MAX_INFLIGHT_BYTES", "0"}}),
      "STITCH_MAX_INFLIGHT_BYTES is \"0\"; allowed: sizes from 1 byte on: with none, no call could "
      "be made");
  EXPECT_EQ(error_with({{"STITCH_INSECURE", "yes"}}), "STITCH_INSECURE is \"yes\"; allowed: 1, 0");
  EXPECT_EQ(error_with({}, {.rank = 0, .world_size = 1, .rpc_timeout = -1500us}),
            "rpc_timeout is \"-1500us\"; allowed: durations from 0 on");
  EXPECT_TRUE(contains(error_with({}, {}), "rank is not known: start the program with stitch-run"));
}

TEST(Options, NegativeNumbersAreNotTakenForNotSet) {
  const Variables launcher({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  for (const int number : {-1, -7, std::numeric_limits<int>::min() + 1}) {
    const std::string text = std::to_string(number);
    EXPECT_EQ(error_with({}, {.rank = number, .world_size = 1}),
              "rank is \"" + text + "\"; allowed: a number from 0 on");
    EXPECT_EQ(error_with({}, {.rank = 0, .world_size = number}),
              "world_size is \"" + text + "\"; allowed: a number from 1 on");
  }
  EXPECT_EQ(error_with({}, {.rank = 0, .world_size = 0}),
            "world_size is \"0\"; allowed: a number from 1 on");
  EXPECT_EQ(stitch::resolve_options({}).world_size, 1);
}

TEST(Options, AWorldSizeIsANumberOrARange) {
  Options options;
  EXPECT_FALSE(options.world_size.is_set());
  options.world_size = 4;
  EXPECT_EQ(options.world_size, 4);
  EXPECT_FALSE(options.world_size.is_elastic());
  options.world_size = "2:8";
  EXPECT_NE(options.world_size, 2);
  EXPECT_TRUE(options.world_size.is_elastic());
  EXPECT_EQ(options.world_size.min(), 2);
  EXPECT_EQ(options.world_size.max(), 8);
  EXPECT_EQ(options.world_size, stitch::WorldSize::range(2, 8));
  EXPECT_EQ(options.world_size.str(), "2:8");
  EXPECT_EQ(stitch::WorldSize("3:").max(), stitch::WorldSize::kNoLimit);
  EXPECT_EQ(stitch::WorldSize("3:").str(), "3:");
  EXPECT_TRUE(stitch::WorldSize("4:4").is_elastic());
  EXPECT_EQ(stitch::WorldSize("4"), 4);
  EXPECT_GT(options.world_size, 1);
  EXPECT_LT(options.world_size, 3);
  for (const char* wrong : {"", ":", ":4", "a", "2:b", "2:4:6", "-1", "2 :3", "99999999999"}) {
    EXPECT_THROW(stitch::WorldSize{wrong}, Error) << wrong;
  }
}

TEST(Options, AnElasticWorldNeedsNoRank) {
  const Options elastic{.world_size = "2:3", .init_method = "file:///tmp/x"};
  EXPECT_EQ(stitch::resolve_options(elastic).name, "");  // until the store gives an id
  const auto ranked = [&](int rank) {
    auto options = elastic;
    options.rank = rank;
    return options;
  };
  EXPECT_EQ(stitch::resolve_options(ranked(2)).name, "worker2");
  EXPECT_EQ(error_with({}, ranked(3)), "rank 3 does not fit a world of 2:3; ranks are 0 to 2");
  for (const std::string size : {"3:2", "0:2"}) {
    EXPECT_EQ(error_with({}, {.world_size = size, .init_method = "file:///tmp/x"}),
              "world_size is \"" + size +
                  "\"; allowed: min:max with a min from 1 on and a max that is not less");
  }
  // Where the place is known and no size is given, workers come and go.
  EXPECT_EQ(stitch::resolve_options({.init_method = "file:///tmp/x"}).world_size.str(), "1:");
}

TEST(Options, TheRangeOfTheEnvironmentCountsMoreThanTheLaunchersNumber) {
  {
    const Variables scope({{"STITCH_WORLD_SIZE", "2:8"},
                           {"RANK", "5"},
                           {"WORLD_SIZE", "8"},
                           {"STITCH_INIT_METHOD", "file:///tmp/x"}});
    const auto options = stitch::resolve_options({});
    EXPECT_EQ(options.world_size.str(), "2:8");
    EXPECT_EQ(options.rank, 5);
    EXPECT_EQ(options.name, "worker5");
  }
  EXPECT_EQ(error_with({{"STITCH_WORLD_SIZE", "2:x"}}, {}),
            "STITCH_WORLD_SIZE is \"2:x\"; allowed: a number from 1 on, or a range such as 2:8 or "
            "2:");
}

TEST(Options, UnknownChoicesAreRefusedInAWorldOfOneToo) {
  const auto with_method = [](const std::string& method) {
    return error_with({}, {.rank = 0, .world_size = 1, .init_method = method});
  };
  const std::string allowed = "; allowed: env://, tcp://host:port, c10d://host:port, file:///path";
  EXPECT_EQ(with_method("tpc://h:1"),
            "init_method is \"tpc://h:1\"" + allowed + "; did you mean tcp://?");
  EXPECT_EQ(with_method("flie:///x"),
            "init_method is \"flie:///x\"" + allowed + "; did you mean file://?");
  for (const char* wrong : {"", "tcp://", "tcp://h", "tcp://:1", "tcp://h:", "tcp://h:0",
                            "tcp://h:65536", "tcp://h:+1", "tcp://[::1:29500", "file://"}) {
    EXPECT_TRUE(
        with_method(wrong).starts_with("init_method is \"" + std::string(wrong) + "\"" + allowed))
        << with_method(wrong);
  }
  EXPECT_EQ(error_with({}, {.rank = 0, .world_size = 1, .transports = {"shn"}}),
            "transports is \"shn\"; allowed: loopback, shm, tcp, tensorpipe-shm, uv; did you mean "
            "shm?");
  EXPECT_EQ(error_with({{"STITCH_TRANSPORTS", "tcp,infiniband"}}),
            "STITCH_TRANSPORTS is \"infiniband\"; allowed: loopback, shm, tcp, tensorpipe-shm, uv");
  EXPECT_EQ(error_with({{"STITCH_GPU_PATHS", "staging,ncl"}}, {.rank = 0, .world_size = 1}),
            "STITCH_GPU_PATHS is \"ncl\"; allowed: peer, nccl, staging; did you mean nccl?");
}

TEST(Options, ATcpPlaceMayBeAnIpv6Address) {
  const auto place = stitch::rpc::parse_tcp_method("tcp://[::1]:29500");
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->host, "::1");
  EXPECT_EQ(place->port, 29500);
  EXPECT_EQ(stitch::rpc::parse_tcp_method("tcp://::1:29500")->host,
            "::1");  // as torchrun's variables
  EXPECT_EQ(stitch::rpc::parse_tcp_method("tcp://node-7:1")->host, "node-7");
}

// A file of a test's own, with this text and mode.
class SecretFile {
 public:
  explicit SecretFile(const std::string& text, mode_t mode = 0600) {
    std::ofstream(path()) << text;
    chmod(path().c_str(), mode);
  }
  [[nodiscard]] std::string path() const { return folder_.path() / "secret"; }

 private:
  TemporaryFolder folder_;
};

TEST(Secret, ComesFromAVariableOrAFile) {
  const Options base{.rank = 0, .world_size = 1};
  {
    const Variables scope(Environment{{"STITCH_SECRET", "from the environment"}});
    EXPECT_EQ(stitch::resolve_options(base).secret, "from the environment");
    EXPECT_EQ(stitch::resolve_options(base).encryption, stitch::Encryption::on);
  }
  for (const char* text : {"from a file", "from a file\n", "from a file\r\n"}) {
    const SecretFile file(text);
    const Variables scope(Environment{{"STITCH_SECRET_FILE", file.path()}});
    EXPECT_EQ(stitch::resolve_options(base).secret, "from a file");
  }
  EXPECT_EQ(stitch::resolve_options(base).secret, std::nullopt);
  EXPECT_EQ(stitch::resolve_options(base).encryption, stitch::Encryption::off);
}

// TensorPipe does not go with a secret, and the user has chosen TensorPipe only.
TEST(Secret, ThatStitchRunHasMadeGivesWayToTensorPipe) {
  const SecretFile file("stitch-random:" + std::string(64, 'a'));
  const Variables scope({{"STITCH_SECRET_FILE", file.path()}});
  EXPECT_TRUE(stitch::resolve_options({.rank = 0, .world_size = 1}).secret);
  const auto options = stitch::resolve_options({.rank = 0, .world_size = 1, .transports = {"uv"}});
  EXPECT_FALSE(options.secret);
  EXPECT_EQ(options.encryption, stitch::Encryption::off);
}

TEST(Secret, ThatIsEmptyOrGivenTwiceIsAnError) {
  EXPECT_TRUE(error_with({{"STITCH_SECRET", ""}}).starts_with("STITCH_SECRET is set but empty"));
  EXPECT_TRUE(
      error_with({{"STITCH_SECRET", " \n"}}).starts_with("STITCH_SECRET has nothing but blanks"));
  EXPECT_EQ(error_with({{"STITCH_SECRET_FILE", ""}}), "STITCH_SECRET_FILE is set but empty");
  EXPECT_EQ(error_with({{"STITCH_SECRET", "x"}, {"STITCH_SECRET_FILE", "/nowhere"}}),
            "STITCH_SECRET and STITCH_SECRET_FILE are both set: set one of them");
}

TEST(Secret, FilesThatOthersCanUseAreRefused) {
  for (const mode_t mode : {0640, 0604, 0620, 0644}) {
    const SecretFile file("secret", mode);
    const std::string error = error_with({{"STITCH_SECRET_FILE", file.path()}});
    EXPECT_TRUE(contains(error, "so that others than its owner can use it; allowed: 0400, 0600"))
        << error;
  }
  const SecretFile empty("\n");
  EXPECT_EQ(error_with({{"STITCH_SECRET_FILE", empty.path()}}),
            "STITCH_SECRET_FILE \"" + empty.path() +
                "\" is set but empty: give all workers the same secret, or unset it to run without "
                "one");
  EXPECT_TRUE(contains(error_with({{"STITCH_SECRET_FILE", "/"}}), "no regular file"));
  EXPECT_TRUE(
      contains(error_with({{"STITCH_SECRET_FILE", "/nowhere/at/all"}}), "cannot be opened"));
}

TEST(Secret, FilesOfOtherUsersAreRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const SecretFile file("secret");
  ASSERT_EQ(chown(file.path().c_str(), 12345, 12345), 0);
  EXPECT_TRUE(contains(error_with({{"STITCH_SECRET_FILE", file.path()}}), "belongs to user 12345"));
}

TEST(Encryption, NeedsASecretAndAKnownName) {
  const Variables scope(Environment{{"STITCH_ENCRYPTION", "off"}});
  EXPECT_EQ(stitch::resolve_options({.rank = 0, .world_size = 1, .secret = "s"}).encryption,
            stitch::Encryption::off);
  EXPECT_TRUE(error_with({{"STITCH_ENCRYPTION", "on"}})
                  .starts_with("STITCH_ENCRYPTION is \"on\" without a secret"));
  EXPECT_EQ(error_with({{"STITCH_ENCRYPTION", "yes"}}),
            "STITCH_ENCRYPTION is \"yes\"; allowed: on, off");
  // The field takes the names, too, and counts before the variable.
  Options options{.rank = 0, .world_size = 1, .secret = "s", .encryption = "off"};
  EXPECT_EQ(stitch::resolve_options(options).encryption, stitch::Encryption::off);
  options.encryption = "on";
  EXPECT_EQ(stitch::resolve_options(options).encryption, stitch::Encryption::on);
  EXPECT_EQ(std::string(error_of([&] { options.encryption = "onn"; }).what()),
            "encryption is \"onn\"; allowed: on, off");
  const char* const unset = nullptr;
  EXPECT_EQ(std::string(error_of([&] { options.encryption = unset; }).what()),
            "encryption is \"(null)\"; allowed: on, off");
  Options other;
  EXPECT_FALSE(options.encryption == other.encryption);
  other.encryption = stitch::Encryption::on;
  EXPECT_TRUE(options.encryption == other.encryption);
}

TEST(TensorPipe, IsRefusedWithASecretUnlessInsecureIsAllowed) {
  const Options options{.rank = 0, .world_size = 1, .transports = {"shm", "uv"}, .secret = "s"};
  EXPECT_TRUE(
      error_with({}, options).starts_with("transports has \"uv\", which is refused with a secret"));
  EXPECT_EQ(error_with({{"STITCH_INSECURE", "1"}}, options), "no error");
  EXPECT_EQ(error_with({{"STITCH_TRANSPORTS", "uv"}}), "no error");
}

TEST(TensorPipe, IsRefusedOnANetworkUnlessInsecureIsAllowed) {
  const auto refused = [](const std::string& transport, const std::string& address) {
    try {
      stitch::rpc::check_tensorpipe_address({"shm", transport}, address);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return true;
    }
    return false;
  };
  EXPECT_TRUE(refused("uv", "10.0.0.7"));
  EXPECT_TRUE(refused("tensorpipe-shm", "10.0.0.7"));
  EXPECT_FALSE(refused("tcp", "10.0.0.7"));
  EXPECT_FALSE(refused("uv", "127.0.0.1"));
  const Variables scope(Environment{{"STITCH_INSECURE", "1"}});
  EXPECT_FALSE(refused("uv", "10.0.0.7"));
}

auto reader_of(Environment variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}
std::optional<stitch::rpc::LaunchInfo> launch(Environment variables) {
  return stitch::rpc::read_launcher(reader_of(std::move(variables)));
}
std::string job(Environment variables) {
  return stitch::rpc::launcher_job(reader_of(std::move(variables)));
}

TEST(Launcher, ReadsTorchrun) {
  const auto info = launch({{"RANK", "1"},
                            {"WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "10.0.0.7"},
                            {"MASTER_PORT", "29500"},
                            {"SLURM_PROCID", "9"}});
  EXPECT_EQ(info->launcher, "torchrun");
  EXPECT_EQ(info->rank, 1);
  EXPECT_EQ(info->world_size, 4);
  EXPECT_EQ(info->init_method, "tcp://10.0.0.7:29500");
}

TEST(Launcher, MeetsAtTheStoreOfTorchrunsAgent) {
  Environment variables{{"RANK", "1"},
                        {"WORLD_SIZE", "4"},
                        {"MASTER_ADDR", "10.0.0.7"},
                        {"MASTER_PORT", "29500"},
                        {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  EXPECT_EQ(launch(variables)->init_method, "c10d://10.0.0.7:29500");
  variables["GROUP_WORLD_SIZE"] = "2";
  EXPECT_EQ(launch(variables)->init_method, "tcp://10.0.0.7:29501");
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_EQ(launch(variables)->init_method, "tcp://10.0.0.7:29500");
  EXPECT_TRUE(stitch::rpc::parse_tcp_method("c10d://[::1]:7")->c10d);
}

TEST(Launcher, ReadsSlurm) {
  const auto info = launch({{"SLURM_PROCID", "3"},
                            {"SLURM_NTASKS", "8"},
                            {"SLURM_NNODES", "2"},
                            {"SLURM_JOB_ID", "77"},
                            {"SLURM_JOB_NODELIST", "gpu[03-07,9],login"}});
  EXPECT_EQ(info->launcher, "Slurm");
  EXPECT_EQ(info->rank, 3);
  EXPECT_TRUE(info->init_method.starts_with("tcp://gpu03:")) << info->init_method;
  EXPECT_TRUE(
      launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}})->init_method.starts_with("file:///"));
  EXPECT_EQ(stitch::rpc::first_slurm_host("a,b"), "a");
  EXPECT_EQ(stitch::rpc::first_slurm_host("n[1,3]"), "n1");
}

TEST(Launcher, ReadsOpenMpiAndMpich) {
  const auto ompi = launch({{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "123"}});
  EXPECT_EQ(ompi->launcher, "Open MPI");
  EXPECT_TRUE(ompi->init_method.starts_with("file:///"));
  const auto mpich = launch({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(mpich->launcher, "MPICH");
  EXPECT_EQ(mpich->world_size, 2);
  EXPECT_FALSE(launch({}).has_value());
}

TEST(Launcher, OfAJobOfAnotherOneComesFirst) {
  const Environment slurm{
      {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "1"}};
  const auto inside = [&](Environment variables) {
    variables.insert(slurm.begin(), slurm.end());
    return variables;
  };
  const auto by_mpirun = inside({{"OMPI_COMM_WORLD_RANK", "3"},
                                 {"OMPI_COMM_WORLD_SIZE", "4"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                 {"PMIX_NAMESPACE", "prterun-7@1"}});
  EXPECT_EQ(launch(by_mpirun)->launcher, "Open MPI");
  EXPECT_EQ(launch(by_mpirun)->rank, 3);
  EXPECT_EQ(job(by_mpirun), "prterun-7-1");
  const auto by_mpich = inside({{"PMI_RANK", "3"}, {"PMI_SIZE", "8"}, {"MPI_LOCALNRANKS", "8"}});
  EXPECT_EQ(launch(by_mpich)->launcher, "MPICH");
  EXPECT_EQ(launch(by_mpich)->world_size, 8);
  // srun's own variables of PMI.
  const auto by_srun = inside({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}});
  EXPECT_EQ(launch(by_srun)->launcher, "Slurm");
  EXPECT_EQ(job(by_srun), "77-1");
  EXPECT_EQ(job(inside({{"STITCH_JOB", "mine"}})), "mine");
  EXPECT_EQ(job(inside({{"RANK", "0"}, {"TORCHELASTIC_RUN_ID", "none"}})), "");
  EXPECT_EQ(job(inside({{"RANK", "0"}, {"TORCHELASTIC_RUN_ID", "r1"}})), "r1");
  EXPECT_EQ(job({}), "");
}

// What the program says, no launcher has to say: its variables may be half there.
TEST(Launcher, IsNotAskedForWhatIsKnown) {
  const Environment half{{"SLURM_PROCID", "7"}, {"SLURM_NNODES", "x"}, {"MASTER_ADDR", "h"}};
  EXPECT_EQ(error_with(half, {.world_size = 1}), "no error");
  EXPECT_EQ(error_with(half, {.rank = 1, .world_size = 2, .init_method = "file:///tmp/x"}),
            "no error");
  EXPECT_EQ(error_with(half, {.rank = 1, .init_method = "file:///tmp/x"}),
            "variable SLURM_NTASKS is not set, though SLURM_PROCID is");
  EXPECT_EQ(error_with(half, {.world_size = 2, .init_method = "file:///tmp/x"}),
            "SLURM_PROCID 7 does not fit a world of 2; ranks are 0 to world_size - 1");
  EXPECT_EQ(error_with(half, {.rank = 1, .world_size = 2}),
            "variable MASTER_PORT is not set, though MASTER_ADDR is");
}

TEST(Launcher, ALinkToAServiceOfKubernetesIsNoPort) {
  const std::string link = "tcp://10.0.0.6:23456";
  EXPECT_EQ(launch({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_PORT", link}})->init_method, "");
  EXPECT_EQ(error_with({{"MASTER_ADDR", "h"}, {"MASTER_PORT", link}}, {.rank = 1, .world_size = 2}),
            "variable MASTER_PORT is a link to a service of Kubernetes, and no port, though "
            "MASTER_ADDR is set");
}

TEST(Launcher, MeetsInTheUsersOwnFolderWhereThereIsOne) {
  char folder[] = "/tmp/stitch-runtime-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const auto method = [&] {
    return launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"XDG_RUNTIME_DIR", folder}})
        ->init_method;
  };
  EXPECT_TRUE(method().starts_with("file://" + std::string(folder) + "/stitch-")) << method();
  ASSERT_EQ(::chmod(folder, 0770), 0);  // others of the group may put a file there
  EXPECT_FALSE(method().starts_with("file://" + std::string(folder))) << method();
  ASSERT_EQ(::rmdir(folder), 0);  // set, but of another host
  EXPECT_TRUE(method().starts_with("file:///")) << method();
  EXPECT_FALSE(method().starts_with("file://" + std::string(folder))) << method();
}

TEST(Launcher, NamesWhatIsMissingOrWrong) {
  const auto text = [](const Environment& variables) {
    return std::string(error_of([&] { launch(variables); }).what());
  };
  EXPECT_EQ(text({{"RANK", "0"}}), "variable WORLD_SIZE is not set, though RANK is");
  EXPECT_EQ(text({{"RANK", "x"}}), "variable RANK is \"x\", not a number from 0 on");
  EXPECT_EQ(text({{"MASTER_ADDR", "h"}}), "variable MASTER_PORT is not set, though MASTER_ADDR is");
}

TEST(Options, WhatIsWipedLeavesNothingBehind) {
  for (const std::size_t length : {9, 300}) {  // within the string itself, and elsewhere
    SCOPED_TRACE(length);
    std::string secret(length, 'x');
    std::string given(std::move(secret));
    stitch::rpc::wipe(secret);  // NOLINT(bugprone-use-after-move): what is left there
    stitch::rpc::wipe(given);
    for (const std::string* each : {&secret, &given}) {
      EXPECT_TRUE(each->empty());
      for (std::size_t i = 0; i < each->capacity(); ++i) EXPECT_EQ(each->data()[i], '\0') << i;
    }
  }
  std::string secret = "opensesame";
  try {
    const stitch::rpc::SecretWiper wiper(secret);
    throw std::runtime_error("something fails");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(secret.empty());
}

}  // namespace
}  // namespace options_test
