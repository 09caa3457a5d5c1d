// Host memory that two processes share: what a peer may name, and what is refused.

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "stitch/base/descriptor.h"
#include "stitch/transport/gpu/outbox_memory.h"
#include "tests/gpu/double/fake_gpu.h"
#include "tests/support/temporary_folder.h"

namespace stitch::transport::gpu::test::outbox_memory_test {
namespace {

constexpr std::size_t kBytes = OutboxLayout::bytes(Path::shared);
constexpr std::uint64_t kKey = 0x0123456789abcdef;
constexpr const char* kNotHere =
    "its file is not to be found here (another PID namespace or user?)";

class SharedHostMemory : public ::testing::Test {
 protected:
  // As a peer would name that file.
  static OutboxHandle named(int file, int process = getpid()) {
    struct stat status {};
    EXPECT_EQ(fstat(file, &status), 0);
    return named(file, process, status.st_dev, status.st_ino);
  }
  static OutboxHandle named(int file, int process, std::uint64_t device, std::uint64_t inode) {
    const std::uint64_t words[] = {static_cast<std::uint64_t>(process),
                                   static_cast<std::uint64_t>(file),
                                   device,
                                   inode,
                                   kKey,
                                   kKey};
    OutboxHandle handle{};
    std::memcpy(handle.data(), words, sizeof(words));
    return handle;
  }
  // Why it is refused; empty: it is not.
  std::string refusal(const OutboxHandle& handle) {
    std::byte* mapped = nullptr;
    const OutboxStep step = map_outbox_memory(world_.cuda(1), Path::shared, handle, &mapped);
    if (mapped != nullptr) {
      EXPECT_TRUE(unmap_outbox_memory(world_.cuda(1), Path::shared, mapped));
    }
    EXPECT_EQ(step.ok(), mapped != nullptr);
    return step.refusal;
  }
  static base::Descriptor memory(std::size_t bytes, unsigned seals) {
    base::Descriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
    const std::uint64_t key[] = {kKey, kKey};
    if (bytes > OutboxLayout::key_at()) {
      EXPECT_EQ(pwrite(file.get(), key, sizeof(key), static_cast<off_t>(OutboxLayout::key_at())),
                static_cast<ssize_t>(sizeof(key)));
    }
    EXPECT_EQ(fcntl(file.get(), F_ADD_SEALS, seals), 0);
    return file;
  }
  bool says(const char* what) { return world_.take_violations().find(what) != std::string::npos; }
  static std::size_t open_files() {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& each : std::filesystem::directory_iterator("/proc/self/fd"))
      ++count;
    return count;
  }

  FakeGpu world_;
};

TEST_F(SharedHostMemory, IsMappedTestedAndReleased) {
  const auto files = open_files();
  cuda::Stream stream = nullptr;
  ASSERT_EQ(world_.cuda(0).stream_create_with_priority(&stream, cuda::kStreamNonBlocking, 0),
            cuda::kSuccess);
  cuda::Stream other = nullptr;
  ASSERT_EQ(world_.cuda(1).stream_create_with_priority(&other, cuda::kStreamNonBlocking, 0),
            cuda::kSuccess);
  const auto owner = OutboxMemory::of(Path::shared, world_.cuda(0));
  ASSERT_TRUE(owner->prepare(stream).ok());
  EXPECT_EQ(world_.run(), "");
  ASSERT_EQ(world_.cuda(0).stream_synchronize(stream), cuda::kSuccess);

  std::byte* mapped = nullptr;
  ASSERT_TRUE(map_outbox_memory(world_.cuda(1), Path::shared, owner->handle(), &mapped).ok());
  EXPECT_NE(mapped, owner->data());
  for (const bool wrong : {false, true}) {
    // What the source's device has written: without it, the mapping is the right one and useless.
    if (wrong) owner->data()[OutboxLayout::key_at() - 1] ^= std::byte{1};
    OutboxTest test(world_.cuda(1), Path::shared);
    ASSERT_TRUE(test.begin(mapped, other).ok());
    EXPECT_EQ(world_.run(), "");
    test.done();
    EXPECT_EQ(test.right(), !wrong);
  }
  EXPECT_TRUE(unmap_outbox_memory(world_.cuda(1), Path::shared, mapped));
  owner->free_memory(false);
  EXPECT_EQ(world_.pinned_memory_used(), 0U);
  EXPECT_EQ(world_.device_memory_used(0), 0U);
  EXPECT_EQ(open_files(), files);
  static_cast<void>(world_.take_violations());  // the two processes exchange no frames here
}

// All in the same words: who offers learns nothing of other files.
TEST_F(SharedHostMemory, OtherFilesAreRefused) {
  EXPECT_EQ(refusal({}), kNotHere);
  const base::Descriptor right = memory(kBytes, F_SEAL_SHRINK | F_SEAL_GROW);
  EXPECT_EQ(refusal(named(right.get())), "");
  EXPECT_EQ(refusal(named(right.get(), getpid(), 1, 1)), kNotHere);
  for (const std::size_t bytes : {kBytes - 4096, kBytes + 4096}) {
    const base::Descriptor size = memory(bytes, F_SEAL_SHRINK | F_SEAL_GROW);
    EXPECT_EQ(refusal(named(size.get())), kNotHere) << bytes;
  }
  for (const unsigned seals : {0U, unsigned{F_SEAL_SHRINK}, unsigned{F_SEAL_GROW}}) {
    const base::Descriptor loose = memory(kBytes, seals);
    EXPECT_EQ(refusal(named(loose.get())), kNotHere) << seals;
  }
  const testing::TemporaryFolder folder;
  const auto path = folder.path() / "file";
  std::ofstream(path) << "a user's own";
  std::filesystem::resize_file(path, kBytes);
  const base::Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(refusal(named(file.get())), kNotHere);
  const auto pipe = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const base::Descriptor fifo(open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  EXPECT_EQ(refusal(named(fifo.get())), kNotHere);  // and nothing waits for a writer
}

// Another program's: all that can be guessed is right, but not its key.
TEST_F(SharedHostMemory, IsForThoseWhoWereToldItsKey) {
  const auto owner = OutboxMemory::of(Path::shared, world_.cuda(0));
  ASSERT_TRUE(owner->prepare(nullptr).ok());
  EXPECT_EQ(world_.run(), "");
  ASSERT_EQ(world_.cuda(0).device_synchronize(), cuda::kSuccess);
  OutboxHandle handle = owner->handle();
  EXPECT_EQ(refusal(handle), "");
  handle[32] = static_cast<char>(handle[32] ^ 1);
  EXPECT_EQ(refusal(handle), kNotHere);
  owner->free_memory(false);
  static_cast<void>(world_.take_violations());
}

TEST_F(SharedHostMemory, WhatTheSystemRefusesIsNamed) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  const auto owner = OutboxMemory::of(Path::shared, world_.cuda(0));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const OutboxStep step = owner->prepare(nullptr);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_NE(step.refusal.find("memfd_create failed: Too many open files"), std::string::npos)
      << step.refusal;
  ASSERT_TRUE(owner->prepare(nullptr).ok());  // the next attempt
  EXPECT_EQ(world_.run(), "");
  owner->free_memory(false);
  static_cast<void>(world_.take_violations());
}

// Host memory that two processes have mapped is one memory, at two addresses.
TEST_F(SharedHostMemory, IsOneMemoryToTheDouble) {
  FakeGpu& world = world_;
  constexpr std::size_t kSome = 1000;
  const int file = memfd_create("pages", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(kSome)), 0);
  void* at[2] = {};
  for (const int process : {0, 1}) {
    at[process] = mmap(nullptr, kSome, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ASSERT_NE(at[process], MAP_FAILED);
    ASSERT_EQ(world.cuda(process).host_register(at[process], kSome, 0), cuda::kSuccess);
  }
  EXPECT_EQ(world.pinned_memory_used(), kSome);
  world.fill(0, nullptr, at[0], kSome, 'y');
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(static_cast<char*>(at[1])[0], 'y');
  const auto equal = std::make_shared<bool>();
  world.check(1, nullptr, at[1], kSome, 'y', equal);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says("is not ordered after the write by"));
  // In order, once this host has seen the end of it.
  ASSERT_EQ(world.cuda(1).device_synchronize(), cuda::kSuccess);
  world.fill(0, nullptr, at[0], kSome, 'z');
  EXPECT_EQ(world.run(), "");
  ASSERT_EQ(world.cuda(0).device_synchronize(), cuda::kSuccess);
  world.check(1, nullptr, at[1], kSome, 'z', equal);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(*equal);
  EXPECT_EQ(world.take_violations(), "");
  // The other one's copies are none of the business of who unregisters.
  EXPECT_EQ(world.cuda(0).host_unregister(at[0]), cuda::kSuccess);
  EXPECT_EQ(world.take_violations(), "");
  world.fill(0, nullptr, at[1], kSome, 'z');
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(says("is not mapped in process 0"));
  EXPECT_EQ(world.cuda(1).host_unregister(at[1]), cuda::kSuccess);
  EXPECT_TRUE(says("unregistration"));  // the check above still may run
  EXPECT_EQ(world.pinned_memory_used(), 0U);
  for (void* const each : at) munmap(each, kSome);
  close(file);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::outbox_memory_test
