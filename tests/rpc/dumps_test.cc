// Dumps that workers write, over clusters in one process.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/support/disabled_test_process.h"
#include "tests/support/world_test.h"

namespace dumps_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using stitch::testing::eventually;
using stitch::testing::TemporaryFolder;

int one() { return 1; }
stitch::Promise<void>& gate() {
  static stitch::Promise<void> promise;
  return promise;
}
void waits_for_the_gate() { gate().future().get(); }

std::string text_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::vector<std::string> files_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  return names;
}

// The part of a dump that is a table.
std::string table_of(const std::string& dump, const std::string& name) {
  const auto begin = dump.find("{\"name\": \"" + name + "\"");
  if (begin == std::string::npos) return "";
  return dump.substr(begin, dump.find("\"left_out\"", begin) - begin);
}

TEST(Dumps, SayWhatIsMadeServedAndWaitedFor) {
  const TemporaryFolder folder;
  Cluster cluster(2);
  stitch::rpc_sync<one>("worker1");
  auto pending = stitch::rpc_async<waits_for_the_gate>("worker1");
  while (cluster[1].debug_info().at("rpc.calls_served") == 0) stitch::rpc_sync<one>("worker1");
  std::string made;
  std::string served;
  // The handler begins to wait soon after it has arrived, and its caller notes soon that it has
  // left.
  const auto complete = [&] {
    return table_of(made, "calls made").find("waits for an answer") != std::string::npos &&
           table_of(served, "threads that wait").find("waits_for_the_gate") != std::string::npos;
  };
  for (int i = 0; i < 1000 && !complete(); ++i) {
    made = text_of(cluster[0].dump(folder.path()));
    served = text_of(cluster[1].dump(folder.path()));
  }
  EXPECT_NE(made.find("\"name\": \"worker0\",\n"), std::string::npos);
  // Of one run.
  const auto world = made.find("\"world\": \"");
  ASSERT_NE(world, std::string::npos) << made;
  EXPECT_NE(served.find(made.substr(world, made.find('\n', world) - world)), std::string::npos)
      << served;
  EXPECT_NE(table_of(made, "calls made").find("waits_for_the_gate\", \"worker1\", 1, "),
            std::string::npos)
      << made;
  EXPECT_NE(table_of(made, "calls made").find("waits for an answer"), std::string::npos) << made;
  EXPECT_NE(table_of(served, "calls served").find("waits_for_the_gate"), std::string::npos)
      << served;
  EXPECT_NE(table_of(served, "calls served").find("running"), std::string::npos) << served;
  EXPECT_NE(table_of(served, "threads that wait").find("\"worker0\""), std::string::npos) << served;
  for (const char* event : {"call made", "call answered", "connection bound"})
    EXPECT_NE(table_of(made, "events").find(event), std::string::npos) << event;
  for (const char* event : {"call received", "call started", "call served"})
    EXPECT_NE(table_of(served, "events").find(event), std::string::npos) << event;
  gate().set_value();
  pending.get();
}

TEST(Dumps, SayWhichMembersHaveLeftOrAreDead) {
  const TemporaryFolder folder;
  const auto store = stitch::transport::make_hash_store();
  const auto start = [&](const char* name) {
    stitch::Options options;
    options.name = name;
    options.world_size = "1:8";
    options.store = store;
    return stitch::init(options);
  };
  auto a = start("a");
  auto leaver = start("b");
  auto victim = start("c");
  auto d = start("d");
  EXPECT_EQ(a.rpc_sync<one>("c"), 1);
  leaver.shutdown();
  victim.shutdown({.graceful = false});
  std::string members;
  const auto says = [&](const char* row) { return members.find(row) != std::string::npos; };
  EXPECT_TRUE(eventually([&] {
    members = table_of(text_of(a.dump(folder.path())), "members");
    return says(R"(["b", 1, 1, "left", )") && says(R"(["c", 2, 1, "dead", )");
  })) << members;
  EXPECT_TRUE(says(R"(["a", 0, 1, "alive", "this worker"])")) << members;
  EXPECT_TRUE(says(R"(["d", 3, 1, "alive", )")) << members;
}

TEST(Dumps, NeedAFolder) {
  Cluster cluster(1);
  try {
    cluster[0].dump();
    FAIL() << "it was written";
  } catch (const stitch::Error& error) {
    EXPECT_EQ(error.code(), stitch::ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("STITCH_DUMP_DIR"), std::string::npos);
  }
  try {
    cluster[0].dump("/no/such/folder");
    FAIL() << "it was written";
  } catch (const stitch::Error& error) {
    EXPECT_NE(std::string(error.what()).find("\"/no/such/folder/worker0."), std::string::npos);
  }
}

TEST(Dumps, AreNotWrittenInAHealthyRunAndTheSignOfLifeGoes) {
  const TemporaryFolder folder;
  const std::string dumps = folder.path() / "dumps";
  {
    Cluster cluster(2, [&](stitch::Options& options) { options.dump_dir = dumps; });
    EXPECT_EQ(stitch::rpc_sync<one>("worker1"), 1);
    EXPECT_EQ(files_in(dumps).size(), 2U);
  }
  EXPECT_EQ(files_in(dumps), std::vector<std::string>{});
}

TEST(Dumps, AreLimitedInNumber) {
  const TemporaryFolder folder;
  Cluster cluster(1, [&](stitch::Options& options) { options.dump_dir = folder.path(); });
  for (int i = 0; i < 40; ++i) cluster[0].dump();
  EXPECT_EQ(files_in(folder.path()).size(), 17U);  // and the sign of life
}

// As the process `pid` of a worker would have written it.
void put_file(const std::filesystem::path& folder, const std::string& file, const std::string& name,
              pid_t pid, const std::string& host) {
  std::ofstream(folder / file, std::ios::binary)
      << "{\n  \"stitch_dump\": 1,\n  \"name\": \"" << name
      << "\",\n  \"id\": 0,\n  \"epoch\": 1,\n  \"world\": \"7\",\n  \"pid\": " << pid
      << ",\n  \"host\": \"" << host
      << "\",\n  \"reason\": \"r\",\n  \"time\": 1,\n  \"tables\": []\n}\n";
}

TEST(Dumps, OfFormerLivesOfTheWorkerAreLimitedInNumberWithItsOwn) {
  const TemporaryFolder folder;
  char host_name[256] = {};
  ASSERT_EQ(::gethostname(host_name, sizeof(host_name) - 1), 0);
  const std::string host = host_name;
  const pid_t dead = ::fork();
  ASSERT_GE(dead, 0);
  if (dead == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(dead, nullptr, 0), dead);
  const std::string process = std::to_string(dead);
  const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  for (int i = 1; i <= 20; ++i) {
    const std::string file = "worker0." + process + '.' + std::to_string(i) + ".r.json";
    put_file(folder.path(), file, "worker0", dead, host);
    std::filesystem::last_write_time(folder.path() / file, long_ago + std::chrono::seconds(i));
  }
  put_file(folder.path(), "worker0." + process + ".running.json", "worker0", dead, host);
  const std::vector<std::string> others{
      "worker0.1.1.r.json",                   // of a process that lives
      "worker0." + process + ".99.r.json",    // of another host
      "worker0.5." + process + ".1.r.json",   // of worker "worker0.5"
      "worker0." + process + ".notes.json"};  // no dump
  put_file(folder.path(), others[0], "worker0", 1, host);
  put_file(folder.path(), others[1], "worker0", dead, host + "2");
  put_file(folder.path(), others[2], "worker0.5", dead, host);
  std::ofstream(folder.path() / others[3]) << "{}";
  const auto has = [&](const std::string& file) {
    return std::filesystem::exists(folder.path() / file);
  };
  Cluster cluster(2, [&](stitch::Options& options) { options.dump_dir = folder.path(); });
  EXPECT_FALSE(has("worker0." + process + ".running.json"));
  for (int i = 1; i <= 20; ++i)
    EXPECT_EQ(has("worker0." + process + '.' + std::to_string(i) + ".r.json"), i > 4) << i;
  cluster[0].dump();
  EXPECT_FALSE(has("worker0." + process + ".5.r.json"));
  EXPECT_TRUE(has("worker0." + process + ".6.r.json"));
  for (const auto& file : others) EXPECT_TRUE(has(file)) << file;
}

TEST(Dumps, WorkersOfOneNameInSeveralWorldsOfAProcessKeepTheirOwnFiles) {
  const TemporaryFolder folder;
  const auto with_folder = [&](stitch::Options& options) { options.dump_dir = folder.path(); };
  const auto count = [&](const char* end) {
    const auto files = files_in(folder.path());
    return std::count_if(files.begin(), files.end(),
                         [end](const std::string& file) { return file.ends_with(end); });
  };
  Cluster first(1, with_folder);
  std::vector<std::string> dumps_of_first;
  for (int i = 0; i < 3; ++i) dumps_of_first.push_back(first[0].dump());
  const auto all_of_first = [&] {
    return std::all_of(dumps_of_first.begin(), dumps_of_first.end(),
                       [](const std::string& file) { return std::filesystem::exists(file); });
  };
  {
    Cluster second(1, with_folder);
    EXPECT_EQ(count(".running.json"), 2);
    for (int i = 0; i < 40; ++i) second[0].dump();
    EXPECT_EQ(count(".asked_for.json"), 3 + 16);
    EXPECT_TRUE(all_of_first());
  }
  EXPECT_EQ(count(".running.json"), 1) << "that of the first one";
  // Those of the second one, which has ended, count with those of the third one.
  Cluster third(1, with_folder);
  for (int i = 0; i < 5; ++i) third[0].dump();
  EXPECT_EQ(count(".asked_for.json"), 3 + 16);
  EXPECT_TRUE(all_of_first());
}

// While it is set, dumps take all the time that they may have, and more.
std::atomic<bool> dumps_are_slow{false};
class SlowReport final : public stitch::rpc::Extension {
 public:
  void report(stitch::rpc::Page, stitch::rpc::Report&) override {
    EXPECT_TRUE(eventually([] { return !dumps_are_slow.load(); }));
  }
};
[[maybe_unused]] const int registered = stitch::rpc::register_extension(
    [](stitch::rpc::Agent&) -> std::unique_ptr<stitch::rpc::Extension> {
      return std::make_unique<SlowReport>();
    });

stitch::testing::Gate handler_gate;
void waits_at_the_gate() { handler_gate.pass(); }

TEST(Dumps, OfAShutdownTakeTheirTimeFromTheSecondInWhichTheWorkerCloses) {
  constexpr auto kLimit = 200ms;
  bool in_time = false;
  // On a busy machine its threads may get no processor for a while.
  for (int i = 0; i < 5 && !in_time; ++i) {
    const TemporaryFolder folder;
    Cluster cluster(2, [&](stitch::Options& options) {
      if (options.rank == 1) options.dump_dir = folder.path();
    });
    handler_gate.close();
    const auto call = stitch::rpc_async<waits_at_the_gate>("worker1");
    ASSERT_TRUE(handler_gate.wait_for_arrival());
    dumps_are_slow = true;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(error_of([&] { cluster[1].shutdown({.wait = kLimit}); }).code(),
              stitch::ErrorCode::timeout);
    const auto took = std::chrono::steady_clock::now() - start;
    EXPECT_GE(took, kLimit + stitch::rpc::Dumps::kTimeToWrite);
    in_time = took <= kLimit + 1s;
    dumps_are_slow = false;
    handler_gate.open();
    EXPECT_TRUE(eventually([&] { return cluster[1].agent().use_count() == 1; }));
  }
  EXPECT_TRUE(in_time);
}

TEST(Dumps, AFolderThatCannotBeUsedFailsTheStart) {
  try {
    Cluster cluster(1, [](stitch::Options& options) { options.dump_dir = "/no/such/folder"; });
    FAIL() << "it has started";
  } catch (const stitch::Error& error) {
    EXPECT_EQ(error.code(), stitch::ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("dump_dir \"/no/such/folder\" cannot be made"),
              std::string::npos)
        << error.what();
  }
}

// Uses the stack up: `more` is never 0.
[[gnu::noinline]] int overflow(int more) {
  volatile char page[4096];
  page[0] = static_cast<char>(more);
  return more == 0 ? 0 : overflow(more + (more < 0 ? -1 : 1)) + page[0];
}
void overflow_here() { overflow(1); }

constexpr const char* kFolder = "DUMPS_TEST_FOLDER";
constexpr const char* kWhere = "DUMPS_TEST_WHERE";

TEST(Dumps, DISABLED_Overflow) {
  const char* const folder = std::getenv(kFolder);
  const char* const where = std::getenv(kWhere);
  if (folder == nullptr || where == nullptr)
    GTEST_SKIP() << "runs only as the process of another test";
  ::alarm(30);
  rlimit stack{};
  ASSERT_EQ(::getrlimit(RLIMIT_STACK, &stack), 0);
  stack.rlim_cur = std::min<rlim_t>(stack.rlim_cur, 8U << 20);  // with none it would not overflow
  ASSERT_EQ(::setrlimit(RLIMIT_STACK, &stack), 0);
  stitch::Options options;
  options.world_size = 1;
  options.store = stitch::transport::make_hash_store();
  options.dump_dir = folder;
  const auto self = stitch::init(options);  // on this thread
  if (where == std::string("init")) overflow(1);
  stitch::rpc_sync<overflow_here>(self.name());
}

TEST(Dumps, AreWrittenWhenAStackOverflows) {
  if (stitch::testing::kAddressSanitizer || stitch::testing::kThreadSanitizer)
    GTEST_SKIP() << "sanitizers handle SIGSEGV by themselves";
  for (const char* const where : {"init", "handler"}) {
    const TemporaryFolder folder;
    stitch::testing::DisabledTestProcess dying("Dumps.DISABLED_Overflow",
                                               {{kFolder, folder.path()}, {kWhere, where}});
    EXPECT_EQ(dying.wait(), 128 + SIGSEGV) << where;
    int dumps = 0;
    for (const std::string& file : files_in(folder.path()))
      dumps += file.find("fatal_signal_SIGSEGV") != std::string::npos ? 1 : 0;
    EXPECT_EQ(dumps, 1) << where;
  }
}

TEST(FaultOption, ThatIsNotUnderstoodFailsTheStart) {
  try {
    Cluster cluster(1, [](stitch::Options& options) { options.fault = "seed=7,drop=often"; });
    FAIL() << "it has started";
  } catch (const stitch::Error& error) {
    EXPECT_EQ(error.code(), stitch::ErrorCode::invalid_argument);
    EXPECT_TRUE(std::string(error.what()).starts_with("fault \"drop=often\" is not understood"));
  }
}

TEST(FaultOption, DelaysEveryMessage) {
  Cluster cluster(2, [](stitch::Options& options) { options.fault = "delay=20ms"; });
  stitch::rpc_sync<one>("worker1");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(stitch::rpc_sync<one>("worker1"), 1);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(40));
}

}  // namespace
}  // namespace dumps_test
