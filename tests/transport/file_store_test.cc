#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stitch/transport/store/file_store.h"
#include "tests/support/forked_child.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::file_store_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::error_of;
using stitch::testing::ForkedChild;

class FileStoreTest : public ::testing::Test {
 protected:
  static std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  static void write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    std::filesystem::permissions(path, std::filesystem::perms(0600));
  }

  const stitch::testing::TemporaryFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  const std::string path_ = folder_ / "store";
  const std::string values_ = path_ + ".values";
};

TEST_F(FileStoreTest, ProcessesWriteTogether) {
  constexpr int kKeys = 100;
  const auto set_all = [](Store& store, const std::string& writer) {
    for (int i = 0; i < kKeys; ++i) store.set(writer + std::to_string(i), writer);
    store.set("done/" + writer, "");
  };
  std::vector<ForkedChild> children;
  for (int c = 0; c < 3; ++c) {
    children.emplace_back([&, c] { set_all(*make_file_store(path_), std::string(1, 'a' + c)); });
  }
  const auto store = make_file_store(path_);
  set_all(*store, "d");
  for (auto& child : children) EXPECT_EQ(child.wait(), 0);
  for (const std::string writer : {"a", "b", "c", "d"}) {
    for (int i = 0; i < kKeys; ++i) EXPECT_EQ(store->try_get(writer + std::to_string(i)), writer);
  }
}

TEST_F(FileStoreTest, AKilledWriterLeavesTheFileUsable) {
  const auto store = make_file_store(path_);
  const std::string big(20'000, 'x');
  for (int round = 0; round < 6; ++round) {
    store->set("n", "0");
    ForkedChild child([&] {
      const auto mine = make_file_store(path_);
      for (int n = 1;; ++n) {
        mine->set("big", big);
        mine->set("n", std::to_string(n));
      }
    });
    while (std::stoi(store->get("n", 0ms)) < 3) ::usleep(100);
    child.kill();
    EXPECT_EQ(child.wait(), 128 + SIGKILL);
    store->set("mine", std::to_string(round));
    const auto again = make_file_store(path_);
    EXPECT_EQ(again->get("mine", 0ms), std::to_string(round));
    EXPECT_EQ(again->get("big", 0ms), big);
    EXPECT_GE(std::stoi(again->get("n", 0ms)), 3);
  }
}

TEST_F(FileStoreTest, ACreatorThatDiedLeavesAUsableFile) {
  (void)make_file_store(path_);
  const std::string header = read(path_);
  for (std::size_t size = 0; size < header.size(); ++size) {
    write(path_, header.substr(0, size));
    make_file_store(path_)->set("k", "v");
    EXPECT_EQ(make_file_store(path_)->get("k", 0ms), "v");
  }
}

TEST_F(FileStoreTest, DamageIsFound) {
  const auto store = make_file_store(path_);
  store->set("first", "1");
  const std::string whole = read(values_);
  for (const std::string& bytes :
       {whole.substr(0, whole.size() - 1), whole + "x", "stitch" + whole, std::string()}) {
    std::filesystem::remove(values_);
    write(values_, bytes);
    const auto error = error_of([&] { (void)store->try_get("first"); });
    EXPECT_EQ(error.code(), ErrorCode::protocol);
    EXPECT_TRUE(
        std::string(error.what()).starts_with("file store at " + path_ + " is damaged: the file"))
        << error.what();
  }
}

// The kernel may have written a part of a claim, or none of its lock.
TEST_F(FileStoreTest, AClaimWhoseWriterDiedIsNone) {
  const auto store = make_file_store(path_);
  const auto first = store->claim("a", "1");
  const std::string good = read(path_);
  const auto second = std::optional(store->claim("b", std::string(100, '2')));
  const std::string whole = read(path_);
  for (std::size_t size = good.size(); size <= whole.size(); ++size) {
    const std::string other = folder_ / ("other" + std::to_string(size));
    write(other, whole.substr(0, size));
    const auto opened = make_file_store(other);
    EXPECT_TRUE(opened->claims("", 1, 0ms).empty());
    const auto claimed = opened->claim("c", "3");
    EXPECT_NE(claimed.claim, nullptr);
    EXPECT_EQ(opened->claims("", 1, 0ms), (std::map<std::string, std::string>{{"c", "3"}}));
  }
}

TEST_F(FileStoreTest, ClaimsThatHaveEndedLeaveTheirPlaceToOthers) {
  const auto store = make_file_store(path_);
  const auto kept = store->claim("kept", "");
  const std::string value(100'000, 'v');
  for (int i = 0; i < 100; ++i)
    EXPECT_NE(store->claim("k" + std::to_string(i), value).claim, nullptr);
  EXPECT_LT(std::filesystem::file_size(path_), std::uintmax_t{3} << 20);
  EXPECT_EQ(make_file_store(path_)->claims("", 1, 0ms).size(), 1U);
}

TEST_F(FileStoreTest, AFileThatIsNoStoreIsRefusedAndNotChanged) {
  const std::string text = "Dear diary,\n";
  write(path_, text);
  const auto error = error_of([&] { (void)make_file_store(path_); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error.what(),
            "file store at " + path_ +
                " cannot be opened: this file is not a stitch store, or one of another version");
  EXPECT_EQ(read(path_), text);

  const auto folder = error_of([&] { (void)make_file_store(folder_); });
  EXPECT_EQ(folder.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(folder.what(),
            "file store at " + folder_.string() + " cannot be opened: is a directory");

  const auto missing = error_of([&] { (void)make_file_store(folder_ / "none" / "store"); });
  EXPECT_EQ(missing.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(missing.what(), "file store at " + folder_.string() +
                                "/none/store cannot be opened: no such file or directory");

  EXPECT_EQ(error_of([&] { (void)make_file_store("/dev/null"); }).code(),
            ErrorCode::invalid_argument);
}

TEST_F(FileStoreTest, AFileThatOtherUsersMayAccessIsRefused) {
  const auto refusal = [&] {
    const auto error = error_of([&] { (void)make_file_store(path_); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return std::string(error.what());
  };
  (void)make_file_store(path_);
  struct stat state {};
  ASSERT_EQ(::stat(path_.c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 07777, 0600U);
  for (const auto& [mode, text] : {std::pair(0644, "0644"), {0620, "0620"}, {0602, "0602"}}) {
    ASSERT_EQ(::chmod(path_.c_str(), static_cast<mode_t>(mode)), 0);
    EXPECT_EQ(refusal(), "file store at " + path_ + " cannot be opened: its mode is " + text +
                             ", so others may use it; only 0600 is allowed");
  }
  ASSERT_EQ(::chmod(path_.c_str(), 0600), 0);
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  ASSERT_EQ(::chown(path_.c_str(), 65534, static_cast<gid_t>(-1)), 0);
  EXPECT_EQ(refusal(), "file store at " + path_ +
                           " cannot be opened: it belongs to user 65534, this process runs as 0");
}

TEST_F(FileStoreTest, ASymbolicLinkIsNotFollowed) {
  const std::string elsewhere = folder_ / "elsewhere";
  std::filesystem::create_symlink(elsewhere, path_);
  const std::string text = "file store at " + path_ + " cannot be opened: it is a symbolic link";
  EXPECT_EQ(error_of([&] { (void)make_file_store(path_); }).what(), text);
  EXPECT_FALSE(std::filesystem::exists(elsewhere)) << "it was made through the link";
  (void)make_file_store(elsewhere);
  EXPECT_EQ(error_of([&] { (void)make_file_store(path_); }).what(), text);
}

TEST_F(FileStoreTest, AFileWithAnotherNameIsRefused) {
  (void)make_file_store(path_);
  std::filesystem::create_hard_link(path_, folder_ / "other");
  EXPECT_EQ(error_of([&] { (void)make_file_store(path_); }).what(),
            "file store at " + path_ + " cannot be opened: it has another name, too (a hard link)");
}

TEST_F(FileStoreTest, ADeletedFileIsFound) {
  const auto store = make_file_store(path_);
  store->set("k", "v");
  std::filesystem::remove(path_);
  const std::string text = "file store at " + path_ + " is gone: the file was deleted or replaced";
  const auto waited = error_of([&] { (void)store->get("other", 30s); });
  EXPECT_EQ(waited.code(), ErrorCode::disconnected);
  EXPECT_EQ(waited.what(), text);
  EXPECT_EQ(error_of([&] { store->set("k", "w"); }).what(), text);

  make_file_store(path_)->set("k", "another life");
  EXPECT_EQ(error_of([&] { (void)store->try_get("k"); }).what(), text);
}

TEST_F(FileStoreTest, AShortenedFileIsFound) {
  const auto store = make_file_store(path_);
  store->set("k", "v");
  write(path_, "");
  EXPECT_EQ(error_of([&] { (void)store->try_get("k"); }).code(), ErrorCode::disconnected);
}

TEST_F(FileStoreTest, ValuesOfAFormerFileAreNotItsOwn) {
  make_file_store(path_)->set("k", "v");
  std::filesystem::remove(path_);
  const auto store = make_file_store(path_);
  EXPECT_EQ(store->try_get("k"), std::nullopt);
  store->set("other", "w");
  EXPECT_EQ(make_file_store(path_)->try_get("k"), std::nullopt);
  EXPECT_EQ(make_file_store(path_)->try_get("other"), "w");
}

TEST_F(FileStoreTest, ValuesThatOtherUsersMayChangeAreRefused) {
  make_file_store(path_)->set("k", "v");
  ASSERT_EQ(::chmod(values_.c_str(), 0620), 0);
  const auto error = error_of([&] { (void)make_file_store(path_)->try_get("k"); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error.what(), "file store at " + path_ +
                              ".values cannot be opened: its mode is 0620, so others may use it; "
                              "only 0600 is allowed");
}

TEST_F(FileStoreTest, WhatADeadProcessHasLeftOfANewFileIsRemoved) {
  const auto store = make_file_store(path_);
  std::ofstream(values_ + ".new") << "half of a fi";
  store->set("k", "v");
  EXPECT_EQ(make_file_store(path_)->try_get("k"), "v");
  EXPECT_FALSE(std::filesystem::exists(values_ + ".new"));
}

TEST_F(FileStoreTest, AStoppedProcessThatHoldsTheLockCannotHoldUpTimeouts) {
  const auto store = make_file_store(path_);
  make_file_store(path_)->set("k", "v");
  const int file = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  struct flock writer {};
  writer.l_type = F_WRLCK;
  writer.l_len = 1;
  ASSERT_EQ(::fcntl(file, F_OFD_SETLK, &writer), 0);
  EXPECT_EQ(store->get("k", 50ms), "v") << "readers need no lock";
  const auto error = error_of([&] { (void)store->claims("", 1, 50ms); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_NE(std::string(error.what()).find("has been locked by another process for"),
            std::string::npos)
      << error.what();
  ::close(file);
  EXPECT_TRUE(store->claims("", 1, 50ms).empty());
}

TEST_F(FileStoreTest, ARelativePathSurvivesAChangeOfFolder) {
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder_);
  const auto store = make_file_store("store");
  std::filesystem::current_path(before);
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 0ms), "v");
  EXPECT_EQ(store->describe(), "file store at store");
}

}  // namespace
}  // namespace stitch::transport::file_store_test
