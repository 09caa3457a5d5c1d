#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stitch/transport/store/file_log.h"
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
  std::string read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  void write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
    std::filesystem::permissions(path_, std::filesystem::perms(0600));
  }

  std::uintmax_t size() const { return std::filesystem::file_size(path_); }

  static constexpr std::uintmax_t kMiB = std::uintmax_t{1} << 20;
  // What makes a file too long after a few.
  static std::string large(int i) { return std::string(kMiB, static_cast<char>('a' + i % 26)); }

  const stitch::testing::TemporaryFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  const std::string path_ = folder_ / "store";
};

TEST_F(FileStoreTest, ProcessesCountTogether) {
  constexpr int kAdds = 200;
  std::vector<ForkedChild> children;
  for (int c = 0; c < 3; ++c) {
    children.emplace_back([&] {
      const auto store = make_file_store(path_);
      for (int i = 0; i < kAdds; ++i) store->add("n", 1);
      store->add("done", 1);
      (void)store->get("go home", 20s);
    });
  }
  const auto store = make_file_store(path_);
  for (int i = 0; i < kAdds; ++i) store->add("n", 1);
  while (store->add("done", 0) < 3) (void)store->try_get("n");
  EXPECT_EQ(store->get("n", 0ms), std::to_string(4 * kAdds));
  store->set("go home", "");
  for (auto& child : children) EXPECT_EQ(child.wait(), 0);
}

TEST_F(FileStoreTest, AKilledWriterLeavesTheFileUsable) {
  const auto store = make_file_store(path_);
  std::int64_t before = 0;
  for (int round = 0; round < 6; ++round) {
    ForkedChild child([&] {
      const auto mine = make_file_store(path_);
      for (;;) {
        mine->set("big", std::string(20'000, 'x'));
        mine->add("n", 1);
      }
    });
    while (store->add("n", 0) < before + 3) ::usleep(100);
    child.kill();
    EXPECT_EQ(child.wait(), 128 + SIGKILL);
    before = store->add("n", 1);
    EXPECT_EQ(make_file_store(path_)->get("n", 0ms), std::to_string(before));
  }
}

TEST_F(FileStoreTest, ATornTailIsIgnoredByReadersAndCutOffByTheNextWriter) {
  {
    const auto store = make_file_store(path_);
    store->set("first", "1");
  }
  const std::string good = read();
  make_file_store(path_)->set("second", "2");
  const std::string whole = read();
  for (std::size_t size = good.size() + 1; size < whole.size(); ++size) {
    write(whole.substr(0, size));
    const auto store = make_file_store(path_);
    EXPECT_EQ(store->get("first", 0ms), "1");
    EXPECT_EQ(store->try_get("second"), std::nullopt);
    EXPECT_EQ(read().size(), size) << "a reader changed the file";
    store->set("second", "2");
    EXPECT_EQ(read(), whole);
  }
  std::string garbled = whole;
  garbled.back() = '!';
  write(garbled);
  EXPECT_EQ(make_file_store(path_)->try_get("second"), std::nullopt);
}

TEST_F(FileStoreTest, ACreatorThatDiedLeavesAUsableFile) {
  (void)make_file_store(path_);
  const std::string header = read();
  for (std::size_t size = 0; size < header.size(); ++size) {
    write(header.substr(0, size));
    make_file_store(path_)->set("k", "v");
    EXPECT_EQ(make_file_store(path_)->get("k", 0ms), "v");
  }
}

TEST_F(FileStoreTest, DamageIsFound) {
  make_file_store(path_)->set("first", "1");
  const std::size_t end_of_first = read().size();
  make_file_store(path_)->set("second", "2");
  std::string bytes = read();
  bytes[end_of_first - 1] = '!';
  write(bytes);
  const auto error = error_of([&] { (void)make_file_store(path_); });
  EXPECT_EQ(error.code(), ErrorCode::protocol);
  EXPECT_EQ(error.what(),
            "file store at " + path_ + " is damaged at byte 16: the checksum of a record is wrong");

  bytes.replace(16, 4, "\xff\xff\xff\xff");
  write(bytes);
  EXPECT_EQ(error_of([&] { (void)make_file_store(path_); }).what(),
            "file store at " + path_ +
                " is damaged at byte 16: a record claims 4294967295 bytes, the limit is 8392704");
}

TEST_F(FileStoreTest, AFileThatIsNoStoreIsRefusedAndNotChanged) {
  const std::string text = "Dear diary,\n";
  write(text);
  const auto error = error_of([&] { (void)make_file_store(path_); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_EQ(error.what(),
            "file store at " + path_ +
                " cannot be opened: this file is not a stitch store, or one of another version");
  EXPECT_EQ(read(), text);

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
  write("");
  EXPECT_EQ(error_of([&] { (void)store->try_get("k"); }).code(), ErrorCode::disconnected);
}

// ---- a file that has become too long is written anew

TEST_F(FileStoreTest, AFileStaysShortAndOpenStoresGoOnWithIt) {
  const auto writer = make_file_store(path_);
  const auto reader = make_file_store(path_);
  const auto sleeper = make_file_store(path_);  // misses several in a row
  writer->set("erased", "");
  writer->set("kept", "from the start");
  ASSERT_EQ(sleeper->try_get("erased"), "");
  writer->erase("erased");
  std::uintmax_t longest = 0;
  for (int i = 0; i < 40; ++i) {
    writer->set("large", large(i));
    longest = std::max(longest, size());
    EXPECT_EQ(reader->get("large", 0ms), large(i));
    EXPECT_EQ(reader->add("n", 1), i + 1);
  }
  EXPECT_LT(longest, 6 * kMiB);
  for (const auto& store : {writer, reader, sleeper, make_file_store(path_)}) {
    EXPECT_EQ(store->try_get("erased"), std::nullopt);
    EXPECT_EQ(store->try_get("kept"), "from the start");
    EXPECT_EQ(store->get("large", 0ms), large(39));
    EXPECT_EQ(store->get("n", 0ms), "40");
  }
  sleeper->set("last", "word");
  EXPECT_EQ(writer->get("last", 0ms), "word");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(FileStoreTest, AProcessThatIsKilledWhileItWritesAFileAnewLosesNothing) {
  const auto store = make_file_store(path_);
  store->set("kept", "1");
  std::int64_t before = 0;
  for (int round = 0; round < 6; ++round) {
    ForkedChild child([&] {
      const auto mine = make_file_store(path_);
      for (int i = 0;; ++i) {
        mine->set("large", large(i));
        mine->add("n", 1);
      }
    });
    for (int i = 0; i < 100'000 && store->add("n", 0) < before + 2 + round; ++i)
      ::usleep(100 + 97 * round);  // so that the kills come at different moments
    child.kill();
    EXPECT_EQ(child.wait(), 128 + SIGKILL);
    const std::int64_t after = store->add("n", 1);
    EXPECT_GE(after, before + 3 + round);
    before = after;
    EXPECT_EQ(store->get("kept", 0ms), "1");
    EXPECT_EQ(make_file_store(path_)->get("n", 0ms), std::to_string(before));
    EXPECT_LT(size(), 8 * kMiB);
  }
}

// The one in the middle leaves the old file, the one behind the new one.
TEST_F(FileStoreTest, AProcessThatIsKilledWithinARewriteLosesNothing) {
  const auto store = make_file_store(path_);
  store->set("kept", "1");
  store->set("k", "v");
  for (const bool behind : {false, true}) {
    ForkedChild child([&] {
      std::vector<std::string> records;
      FileLog log(path_, [&](std::string_view record) { records.emplace_back(record); });
      FileLog::Writer writer(log);
      writer.rewrite([&](const FileLog::Writer::Put& put) {
        for (const std::string& record : records) {
          put(record);
          if (!behind) ::kill(::getpid(), SIGKILL);
        }
      });
      ::kill(::getpid(), SIGKILL);
    });
    EXPECT_EQ(child.wait(), 128 + SIGKILL);
    for (const auto& each : {store, make_file_store(path_)}) {
      EXPECT_EQ(each->get("kept", 0ms), "1") << behind;
      EXPECT_EQ(each->get("k", 0ms), "v") << behind;
    }
    EXPECT_EQ(store->add("n", 1), behind ? 2 : 1);
  }
}

TEST_F(FileStoreTest, WhatADeadProcessHasLeftOfANewFileIsRemoved) {
  const auto store = make_file_store(path_);
  std::ofstream(path_ + ".stitch.new") << "half of a fi";
  for (int i = 0; i < 8; ++i) store->set("large", large(i));
  EXPECT_LT(size(), 6 * kMiB);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".stitch.new"));
}

TEST_F(FileStoreTest, AStoppedProcessThatHoldsTheLockCannotHoldUpTimeouts) {
  const auto store = make_file_store(path_);
  make_file_store(path_)->set("k", "v");
  const int file = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(file, LOCK_EX), 0);
  const auto error = error_of([&] { (void)store->get("k", 50ms); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_NE(std::string(error.what()).find("has been locked by another process for"),
            std::string::npos)
      << error.what();
  ::close(file);
  EXPECT_EQ(store->get("k", 1s), "v");
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
