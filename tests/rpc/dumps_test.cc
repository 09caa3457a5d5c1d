// Dumps that workers write, over clusters in one process.

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "stitch/base/own_folder.h"
#include "tests/support/world_test.h"

namespace dumps_test {
namespace {

using namespace stitch::testing;

int one() { return 1; }
Promise<void>& gate() {
  static Promise<void> promise;
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
  rpc_sync<one>("worker1");
  auto pending = rpc_async<waits_for_the_gate>("worker1");
  while (cluster[1].debug_info().at("rpc.calls_served") == 0) rpc_sync<one>("worker1");
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
  EXPECT_TRUE(contains(made, "\"name\": \"worker0\",\n"));
  // Of one run.
  const auto world = made.find("\"world\": \"");
  ASSERT_NE(world, std::string::npos) << made;
  EXPECT_NE(served.find(made.substr(world, made.find('\n', world) - world)), std::string::npos)
      << served;
  EXPECT_TRUE(contains(table_of(made, "calls made"), "waits_for_the_gate\", \"worker1\", 1, "))
      << made;
  EXPECT_TRUE(contains(table_of(made, "calls made"), "waits for an answer")) << made;
  EXPECT_TRUE(contains(table_of(served, "calls served"), "waits_for_the_gate")) << served;
  EXPECT_TRUE(contains(table_of(served, "calls served"), "running")) << served;
  EXPECT_TRUE(contains(table_of(served, "threads that wait"), "\"worker0\"")) << served;
  for (const char* event : {"call made", "call answered", "connection bound"})
    EXPECT_TRUE(contains(table_of(made, "events"), event)) << event;
  for (const char* event : {"call received", "call started", "call served"})
    EXPECT_TRUE(contains(table_of(served, "events"), event)) << event;
  gate().set_value();
  pending.get();
}

TEST(Dumps, SayWhichMembersHaveLeftOrAreDead) {
  const TemporaryFolder folder;
  const auto store = stitch::transport::make_hash_store();
  const auto start = [&](const char* name) {
    Options options;
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
  EXPECT_TRUE(has_text(error_of([&] { cluster[0].dump(); }), ErrorCode::invalid_argument,
                       "STITCH_DUMP_DIR"));
  EXPECT_TRUE(contains(error_of([&] { cluster[0].dump("/no/such/folder"); }).what(),
                       "\"/no/such/folder/worker0."));
}

TEST(Dumps, AreNotWrittenInAHealthyRun) {
  const TemporaryFolder folder;
  const std::string dumps = folder.path() / "dumps";
  {
    Cluster cluster(2, {.dump_dir = dumps});
    EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  }
  EXPECT_EQ(files_in(dumps), std::vector<std::string>{});
}

TEST(Dumps, AreLimitedInNumber) {
  const TemporaryFolder folder;
  Cluster cluster(1, {.dump_dir = folder.path()});
  for (int i = 0; i < 40; ++i) cluster[0].dump();
  EXPECT_EQ(files_in(folder.path()).size(), 16U);
}

TEST(Dumps, AFolderThatCannotBeUsedFailsTheStart) {
  const Error error = error_of([] { Cluster cluster(1, {.dump_dir = "/no/such/folder"}); });
  EXPECT_TRUE(
      has_text(error, ErrorCode::invalid_argument, "dump_dir \"/no/such/folder\" cannot be made"));
}

// Of another user, who has made the folder first.
TEST(Dumps, APlantedFolderIsRefused) {
  const TemporaryFolder folder;
  const auto refusal = [](const std::filesystem::path& dumps) -> std::string {
    try {
      Cluster cluster(1, {.dump_dir = dumps});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "it has started";
  };
  const auto expect = [&](const std::filesystem::path& dumps, const std::string& why) {
    const std::string text = refusal(dumps);
    EXPECT_TRUE(contains(text, "cannot be used: " + why)) << text;
  };
  const auto open = folder.path() / "open";
  ASSERT_EQ(::mkdir(open.c_str(), 0700), 0);
  for (const mode_t mode : {0777, 01777, 0770, 0702}) {
    ASSERT_EQ(::chmod(open.c_str(), mode), 0);
    expect(open, "other users may write in it");
  }
  ASSERT_EQ(::chmod(open.c_str(), 0700), 0);
  const auto link = folder.path() / "link";
  std::filesystem::create_directory_symlink(open, link);
  expect(link, "it is no folder, or a link to one");
  expect(link.string() + "/", "it is no folder, or a link to one");
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give folders away";
  ASSERT_EQ(::chown(open.c_str(), 12345, 0), 0);
  expect(open, "it belongs to user 12345");
}

// What has the name of a file is not opened: a pipe would hold the writer up, a link lead it
// elsewhere, and a file of another mode give the dump to other users.
TEST(Dumps, APlantedFileIsReplaced) {
  const TemporaryFolder folder;
  const stitch::base::Descriptor opened = stitch::base::open_own_folder(folder.path());
  const auto elsewhere = folder.path() / "elsewhere";
  const std::string part = "dump." + std::to_string(::getpid()) + ".part";
  const std::function<void(const std::filesystem::path&)> plants[] = {
      [](const auto& at) { ASSERT_EQ(::mkfifo(at.c_str(), 0666), 0); },
      [&](const auto& at) { std::filesystem::create_symlink(elsewhere, at); },
      [&](const auto& at) {
        std::ofstream(elsewhere) << "mine";
        std::filesystem::create_hard_link(elsewhere, at);
      },
      [](const auto& at) {
        std::ofstream(at) << "theirs";
        ASSERT_EQ(::chmod(at.c_str(), 0666), 0);
      }};
  for (const auto& plant : plants) {
    for (const std::string& name : {part, std::string("dump")}) {
      plant(folder.path() / name);
      ASSERT_TRUE(stitch::base::write_file(opened.get(), "dump", "text"));
      EXPECT_EQ(text_of(folder.path() / "dump"), "text");
      struct stat state {};
      ASSERT_EQ(::lstat((folder.path() / "dump").c_str(), &state), 0);
      EXPECT_EQ(state.st_mode, static_cast<mode_t>(S_IFREG | 0600));
      std::filesystem::remove(folder.path() / "dump");
    }
  }
  EXPECT_EQ(text_of(elsewhere), "mine");
  EXPECT_EQ(files_in(folder.path()), std::vector<std::string>{"elsewhere"});
}

TEST(FaultOption, DelaysEveryMessage) {
  Cluster cluster(2, {.fault = "delay=20ms"});
  rpc_sync<one>("worker1");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(40));
}

}  // namespace
}  // namespace dumps_test
