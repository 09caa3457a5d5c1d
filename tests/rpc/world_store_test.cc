// How the keeper of a world's record gets on with a store that is lost, replaced or refuses it, and
// a worker that starts with one that hangs.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "stitch/rpc/world/world_keeper.h"
#include "stitch/rpc/world/world_record.h"
#include "stitch/transport/store/file_store.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/store/tcp_store.h"
#include "tests/support/forked_child.h"
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
  return stitch::transport::make_prefix_store("stitch//", std::move(store));
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
  // The worker that keeps a world there; empty if none does.
  [[nodiscard]] std::string keeper() const {
    if (!fs::exists(path_)) return {};
    const auto claims =
        keys_of(stitch::transport::make_file_store(path_))->claims(world_key::kKeeper, 1, 1s);
    return claims.empty() ? "" : claims.begin()->second;
  }
  // The keeper's look has ended: the record is the last that it writes.
  [[nodiscard]] bool is_kept() const {
    return eventually([&] {
      return keeper().ends_with(" of a") &&
             keys_of(stitch::transport::make_file_store(path_))->try_get(world_key::kWorld);
    });
  }

  const TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path() / "folder";
  const fs::path path_ = folder_ / "store";
};

TEST_F(WorldFile, ThatIsDeletedIsMadeAnew) {
  const Stderr printed;
  auto a = stitch::init(elastic("a"));
  for (int i = 0; i < 2; ++i) {
    fs::remove(path_);
    EXPECT_TRUE(is_kept());
  }
  auto b = stitch::init(elastic("b"));
  EXPECT_EQ(a.rpc_sync<two_times>("b", 21), 42) << "it is another world";
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
    EXPECT_TRUE(is_kept());
    fs::remove_all(folder_);
    EXPECT_TRUE(eventually([&] { return printed.count(line) == 1; }));
    fs::create_directory(folder_);
  }
  EXPECT_TRUE(is_kept());
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

// Of claims and answers, that is.
TEST(WorldKeeper, LeavesNothingOfThoseThatHaveJoined) {
  const auto store = stitch::transport::make_hash_store();
  auto a = stitch::init(at_store("a", store));
  const auto keys = keys_of(store);
  const auto record = keys->try_get(world_key::kWorld);
  for (int i = 1; i <= 3; ++i) {
    auto b = stitch::init(at_store("b", store));
    EXPECT_EQ(b.info(), (stitch::WorkerInfo{"b", stitch::WorkerId(1), std::uint64_t(i)}));
    EXPECT_EQ(a.rpc_sync<two_times>("b", 4), 8);
    b.shutdown();
  }
  EXPECT_TRUE(keys->claims(world_key::kMember, 1, Store::Timeout(0)).empty());
  EXPECT_TRUE(eventually([&] {
    return keys->try_get(world_key::kWorld) == WorldRecord{a.agent()->world()}.encode();
  }));
}

// Another user of the store has written it.
TEST(WorldKeeper, RefusesAClaimThatMakesNoSense) {
  const auto store = stitch::transport::make_hash_store();
  auto a = stitch::init(at_store("a", store));
  const auto keys = keys_of(store);
  const auto claim = keys->claim(std::string(world_key::kMember) + "x", "rubbish").claim;
  const auto answer = WorldRecord::decode(keys->get(std::string(world_key::kAnswer) + "x", 20s));
  EXPECT_TRUE(has_text(*answer.failure_of("x"), ErrorCode::invalid_argument,
                       "the claim of another worker is not of a worker of stitch"));
  auto b = stitch::init(at_store("b", store));
  EXPECT_EQ(a.rpc_sync<two_times>("b", 4), 8);
}

TEST(InitTimeout, BoundsInitAlsoWhereTheHostOfTheStoreHangs) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kLimit = 2s;
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  stitch::testing::ForkedChild host([&] {
    const stitch::transport::TcpStoreServer server({});
    const std::uint16_t port = server.port();
    if (::write(pipe[1], &port, sizeof(port)) != sizeof(port)) return;
    std::this_thread::sleep_for(kLimit / 2);
    ::raise(SIGSTOP);
  });
  std::uint16_t port = 0;
  ASSERT_EQ(::read(pipe[0], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
  for (const int end : pipe) ::close(end);
  const std::string method = "tcp://127.0.0.1:" + std::to_string(port);
  const auto began = Clock::now();
  const Error error = error_of([&] {
    auto worker = stitch::init(
        {.name = "b", .rank = 1, .world_size = 2, .init_method = method, .init_timeout = kLimit});
  });
  const auto took = Clock::now() - began;
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, "unknown, as the store does not answer"));
  EXPECT_GE(took, kLimit);
  EXPECT_LT(took, kLimit + OpenStore::kGraceTime + 1s);  // a second for the machine
}

}  // namespace
}  // namespace world_store_test
