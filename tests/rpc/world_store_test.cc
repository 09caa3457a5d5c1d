// How the keeper of a world's record gets on with a store that is lost, replaced or refuses it, and
// a worker that starts with one that hangs.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>

#include "stitch/rpc/world/world_keeper.h"
#include "stitch/rpc/world/world_record.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/store/tcp_store.h"
#include "tests/support/world_test.h"

namespace world_store_test {
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Options;
using stitch::rpc::OpenStore;
using stitch::rpc::WorldKeeper;
using stitch::rpc::WorldRecord;
using stitch::testing::error_of;
using stitch::testing::eventually;
using stitch::testing::has_text;
using stitch::testing::TemporaryFolder;
using stitch::transport::Store;
namespace fs = std::filesystem;
namespace world_key = stitch::rpc::world_key;

int two_times(int x) { return 2 * x; }

// What is printed on stderr, until the destructor.
class Stderr {
 public:
  Stderr() {
    std::fflush(stderr);
    const int file = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    EXPECT_GE(file, 0);
    ::dup2(file, STDERR_FILENO);
    ::close(file);
  }
  ~Stderr() {
    std::fflush(stderr);
    ::dup2(former_, STDERR_FILENO);
    ::close(former_);
    std::fputs(text().c_str(), stderr);
  }
  Stderr(const Stderr&) = delete;
  Stderr& operator=(const Stderr&) = delete;
  [[nodiscard]] std::string text() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  [[nodiscard]] int count(const std::string& part) const {
    const std::string all = text();
    int found = 0;
    for (auto at = all.find(part); at != std::string::npos; at = all.find(part, at + 1)) ++found;
    return found;
  }

 private:
  const TemporaryFolder folder_;
  const fs::path path_ = folder_.path() / "stderr";
  const int former_ = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
};

std::shared_ptr<Store> keys_of(std::shared_ptr<Store> store) {
  return stitch::transport::make_prefix_store("stitch", std::move(store));
}

// Worlds that meet at a file.
class WorldFile : public ::testing::Test {
 protected:
  WorldFile() { fs::create_directory(folder_); }
  Options elastic(const std::string& name) const {
    return {.name = name,
            .world_size = "1:8",
            .init_method = "file://" + path_.string(),
            .rpc_timeout = 20s,
            .init_timeout = 30s,
            .shutdown_timeout = 10s};
  }
  // Whose world the file has; empty if it has none, or is not there.
  [[nodiscard]] std::vector<std::string> live_names() const {
    if (!fs::exists(path_)) return {};
    const auto text =
        keys_of(stitch::transport::make_file_store(path_))->try_get(world_key::kWorld);
    return text && !text->empty() ? WorldRecord::decode(*text).live_names()
                                  : std::vector<std::string>{};
  }
  [[nodiscard]] bool has(const std::vector<std::string>& names) const {
    return eventually([&] { return live_names() == names; });
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path() / "folder";
  const fs::path path_ = folder_ / "store";
};

TEST_F(WorldFile, ThatIsDeletedIsMadeAnewWithTheRecord) {
  const Stderr printed;
  auto a = stitch::init(elastic("a"));
  for (int i = 0; i < 2; ++i) {
    fs::remove(path_);
    EXPECT_TRUE(has({"a"}));
  }
  auto b = stitch::init(elastic("b"));
  EXPECT_EQ(a.rpc_sync<two_times>("b", 21), 42) << "it is another world";
  EXPECT_TRUE(has({"a", "b"}));
  EXPECT_EQ(printed.text(), "");
}

TEST_F(WorldFile, WithoutAFolderIsSaidOnceAndLookedForAgain) {
  const Stderr printed;
  auto a = stitch::init(elastic("a"));
  const std::string line =
      "stitch: worker \"a\" (id 0) cannot keep the record of its world: "
      "file store at " +
      path_.string() + " cannot be opened: no such file or directory\n";
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(has({"a"}));
    fs::remove_all(folder_);
    EXPECT_TRUE(eventually([&] { return printed.count(line) == 1; }));
    fs::create_directory(folder_);
  }
  EXPECT_TRUE(has({"a"}));
  EXPECT_EQ(printed.text(), line);
}

Options at_store(const std::string& name, std::shared_ptr<Store> store) {
  return {.name = name,
          .world_size = "1:8",
          .rpc_timeout = 20s,
          .init_timeout = 30s,
          .shutdown_timeout = 10s,
          .store = std::move(store)};
}

TEST(WorldKeeper, OfALifeThatIsOverTheRecordHasNameIdAndEpochOnly) {
  const auto store = stitch::transport::make_hash_store();
  auto a = stitch::init(at_store("a", store));
  auto b = stitch::init(at_store("b", store));
  const auto entry_of_b = [&]() -> std::optional<WorldRecord::Entry> {
    const auto record = WorldRecord::decode(keys_of(store)->try_get(world_key::kWorld).value());
    const auto* found = record.find("b");
    return found == nullptr ? std::nullopt : std::optional(*found);
  };
  EXPECT_TRUE(eventually([&] { return entry_of_b() && entry_of_b()->live; }));
  EXPECT_FALSE(entry_of_b()->card.record.empty());
  b.shutdown();
  EXPECT_TRUE(eventually([&] { return !entry_of_b()->live; }));
  EXPECT_EQ(entry_of_b()->card, (stitch::rpc::MemberCard{{"b", stitch::WorkerId(1), 1}, {}, {}}));
  auto again = stitch::init(at_store("b", store));
  EXPECT_EQ(again.info(), (stitch::WorkerInfo{"b", stitch::WorkerId(1), 2}));
  EXPECT_EQ(a.rpc_sync<two_times>("b", 4), 8);
}

TEST(WorldKeeper, TheRecordOfAllNamesThatAWorldCanHaveFitsIntoAStore) {
  constexpr std::size_t kName = 100;
  WorldRecord record;
  record.size = "1:8";
  for (std::uint32_t id = 0; id < 65'536; ++id) {
    std::string name = "worker" + std::to_string(id);
    name.resize(kName, '-');
    record.entries.push_back({{{name, stitch::WorkerId(id), 1}, {}, {}}, false});
  }
  EXPECT_LE(record.encode().size(), Store::kMaxValueBytes);
}

TEST(InitTimeout, BoundsInitAlsoWhereTheHostOfTheStoreHangs) {
  using stitch::transport::TcpStoreServer;
  using Clock = std::chrono::steady_clock;
  constexpr auto kLimit = 2s;
  constexpr int kPorts = 16;  // that workers look at
  stitch::base::EventLoop loop("store server");
  // The store is at a port after that of a server of another job, which is free for this.
  const TcpStoreServer other(loop, {});
  const auto port = static_cast<std::uint16_t>(std::min<int>(other.port(), 65536 - kPorts));
  const std::string method = "tcp://127.0.0.1:" + std::to_string(port);
  const TcpStoreServer server(loop, {.port = port, .port_span = kPorts, .job = method});
  const auto began = Clock::now();
  std::promise<void> release;
  loop.call_at(began + kLimit / 2, [held = release.get_future().share()] { held.wait(); });
  const Error error = error_of([&] {
    auto worker = stitch::init(
        {.name = "b", .rank = 1, .world_size = 2, .init_method = method, .init_timeout = kLimit});
  });
  const auto took = Clock::now() - began;
  release.set_value();
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, "unknown, as the store does not answer"));
  EXPECT_GE(took, kLimit);
  EXPECT_LT(took, kLimit + OpenStore::kGraceTime + 1s);  // a second for the machine
}

}  // namespace
}  // namespace world_store_test
