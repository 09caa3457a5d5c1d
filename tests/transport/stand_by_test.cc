// When a thread of a poller stands by, with a clock of the test's; and pollers whose threads do.
#include <sys/eventfd.h>
#include <unistd.h>

#include "stitch/transport/polling/poller.h"
#include "stitch/transport/polling/stand_by.h"
#include "tests/support/plain_test.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::stand_by_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using TimePoint = StandBy::TimePoint;
using Duration = StandBy::Duration;

class StandByTest : public ::testing::Test {
 protected:
  // The role is released, and traffic wakes a thread `after` that.
  void wake(Duration after) {
    stand_by.role_released(now);
    now += after;
    stand_by.woken(now);
  }
  void wake_in_vain(int times) {
    for (int i = 0; i < times; ++i) wake(microseconds(1));
  }
  [[nodiscard]] bool begin() { return stand_by.begin(now); }
  void begin_at_last() {
    wake_in_vain(StandBy::kVainWakeUps);
    ASSERT_TRUE(begin());
  }
  // A tick in which the role was taken and released, and in which that saved `uses` wake-ups.
  bool busy_tick(int uses = 1) {
    stand_by.role_taken();
    for (int i = 0; i < uses; ++i) stand_by.found_waiting();
    now += StandBy::kTick;
    stand_by.role_released(now);
    return stand_by.tick();
  }
  void end() { stand_by.end(now); }
  // Work of `pieces`, each taking `each`. What end_work() says.
  bool do_work(int pieces, Duration each) {
    bool watched = false;
    stand_by.role_released(now);
    for (int i = 0; i < pieces; ++i) {
      how.push_back(stand_by.begin_piece(work, watched));
      now += each;
    }
    return stand_by.end_work(pieces, watched, now);
  }

  TimePoint now{seconds(1000)};
  StandBy stand_by;
  int handed_off = 0;
  DeferredWork work = [this](DoWork done) {
    if (done == DoWork::elsewhere) ++handed_off;
    return true;
  };
  std::vector<DoWork> how;
};

TEST_F(StandByTest, BeginsAfterWakeUpsInVain) {
  EXPECT_FALSE(begin());
  wake_in_vain(StandBy::kVainWakeUps - 1);
  EXPECT_FALSE(begin());
  wake(StandBy::kVainWakeUp + microseconds(1));
  wake_in_vain(StandBy::kVainWakeUps - 1);
  EXPECT_FALSE(begin()) << "they were not in a row";
  wake_in_vain(1);
  EXPECT_FALSE(stand_by.active());
  EXPECT_TRUE(begin());
  EXPECT_TRUE(stand_by.active());
  EXPECT_FALSE(begin()) << "one thread does already";
}

TEST_F(StandByTest, BeginsAfterWorkOfManyShortPieces) {
  for (int i = 1; i < StandBy::kVainWakeUps; ++i) EXPECT_FALSE(do_work(3, microseconds(2)));
  EXPECT_FALSE(do_work(1, microseconds(2))) << "no thread was woken for that";
  EXPECT_TRUE(do_work(3, microseconds(2)));
  EXPECT_TRUE(begin());
}

TEST_F(StandByTest, DoesNotBeginAfterWorkOfLongPieces) {
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(do_work(3, StandBy::kShortPiece));
  EXPECT_FALSE(begin());
}

TEST_F(StandByTest, TakesTheRoleWhenItWasFreeForAWholeTick) {
  begin_at_last();
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(busy_tick()) << i;
  EXPECT_TRUE(stand_by.tick());
  EXPECT_FALSE(busy_tick());
}

TEST_F(StandByTest, StopsWhenItIsOfNoUse) {
  begin_at_last();
  for (std::uint32_t i = 1; i < StandBy::kTicksOfUse; ++i) EXPECT_FALSE(busy_tick(0));
  EXPECT_TRUE(busy_tick(0));
  EXPECT_TRUE(busy_tick(0)) << "until it has the role";
  end();
  EXPECT_FALSE(stand_by.active());
}

TEST_F(StandByTest, WaitsLongerEachTimeThatItWasOfNoUse) {
  Duration wanted = StandBy::kMinBackoff;
  for (int i = 0; i < 10; ++i) {
    begin_at_last();
    EXPECT_TRUE(stand_by.tick());
    end();
    EXPECT_FALSE(begin());
    wake_in_vain(StandBy::kVainWakeUps);
    const TimePoint ended = now;
    now = ended + wanted - microseconds(10);
    EXPECT_FALSE(begin()) << i;
    now = ended + wanted;
    wanted = std::min<Duration>(wanted * 2, StandBy::kMaxBackoff);
  }
}

TEST_F(StandByTest, BeginsAgainAtOnceAfterItWasOfUse) {
  begin_at_last();
  while (!busy_tick() && now < TimePoint(seconds(1000)) + 2 * StandBy::kUseful) {
  }
  EXPECT_TRUE(stand_by.tick());
  end();
  EXPECT_FALSE(begin());
  wake_in_vain(1);
  EXPECT_TRUE(begin());
}

TEST_F(StandByTest, PiecesAreWatchedWhileAThreadStandsBy) {
  static_cast<void>(do_work(2, microseconds(1)));
  begin_at_last();
  static_cast<void>(do_work(2, microseconds(1)));
  end();
  static_cast<void>(do_work(1, microseconds(1)));
  const std::vector<DoWork> wanted{DoWork::here, DoWork::here, DoWork::here_watched,
                                   DoWork::here_watched, DoWork::here};
  EXPECT_EQ(how, wanted);
  EXPECT_EQ(handed_off, 0);
}

TEST_F(StandByTest, WorkThatTakesLongIsHandedOff) {
  begin_at_last();
  bool watched = false;
  EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here_watched);
  EXPECT_FALSE(busy_tick());
  EXPECT_EQ(handed_off, 0) << "it may just have begun";
  EXPECT_FALSE(busy_tick());
  EXPECT_EQ(handed_off, 1);
  EXPECT_FALSE(stand_by.end_work(1, watched, now));
  EXPECT_FALSE(busy_tick());
  EXPECT_EQ(handed_off, 1) << "it has ended";
}

TEST_F(StandByTest, WorkOfManyPiecesIsNot) {
  begin_at_last();
  bool watched = false;
  for (int i = 0; i < 20; ++i) {
    for (std::uint32_t k = 0; k < StandBy::kFewPieces; ++k)
      EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here_watched);
    EXPECT_FALSE(busy_tick());
  }
  EXPECT_EQ(handed_off, 0);
}

TEST_F(StandByTest, OthersAreWokenAtOnceWhileWorkKeepsTakingLong) {
  begin_at_last();
  bool watched = false;
  for (int i = 0; i <= StandBy::kSlowTicks; ++i) {
    EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here_watched) << i;
    EXPECT_FALSE(busy_tick());
  }
  EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here);
  EXPECT_FALSE(stand_by.end_work(5, watched, now));
  for (int i = 1; i < StandBy::kTicksOfHelp; ++i) EXPECT_FALSE(busy_tick());
  watched = false;
  EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here);
  EXPECT_FALSE(busy_tick());
  EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here_watched) << "for a while only";
}

TEST_F(StandByTest, HandsOffWhatIsWatchedWhenItStops) {
  begin_at_last();
  bool watched = false;
  EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here_watched);
  end();
  EXPECT_EQ(handed_off, 1);
  EXPECT_EQ(stand_by.begin_piece(work, watched), DoWork::here);
}

// A source over an eventfd that defers work of three pieces whenever it is signalled.
class Bursts final : public PollSource {
 public:
  explicit Bursts(Poller& poller) : poller_(poller) {}
  bool poll() override { return false; }
  bool ready(std::uint32_t) override {
    std::uint64_t value = 0;
    if (::read(fd.get(), &value, sizeof(value)) != sizeof(value)) return false;
    bursts.fetch_add(1);
    Poller::Work work = [this, left = std::make_shared<std::atomic<int>>(3)](DoWork done) {
      if (done == DoWork::elsewhere) {
        handed_off = true;
        return false;
      }
      if (done == DoWork::here_watched) {
        watched = true;
        if (block.exchange(false)) {
          static_cast<void>(wait_until([&] { return handed_off.load(); }, seconds(20)));
        }
      }
      return left->fetch_sub(1) > 1;
    };
    static_cast<void>(poller_.defer(work));
    return true;
  }
  void signal() const {
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(fd.get(), &one, sizeof(one)), 8);
  }
  // Without sleeping: the next signal is to come while a thread still polls, or is just back.
  [[nodiscard]] bool wait_bursts(int count) const {
    const auto end = Poller::Clock::now() + seconds(10);
    while (bursts.load() < count) {
      if (Poller::Clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }

  const base::Descriptor fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<int> bursts{0};
  std::atomic<bool> watched{false};     // a piece has been done as here_watched
  std::atomic<bool> block{false};       // the next such piece blocks until it is handed off
  std::atomic<bool> handed_off{false};  // some work has been

 private:
  Poller& poller_;
};

class PollerStandsBy : public ::testing::Test {
 protected:
  ~PollerStandsBy() override { poller->join(); }
  // Signals until a thread stands by.
  [[nodiscard]] bool stand_by() {
    source->watched = false;
    return signal_until([&] { return source->watched.load(); });
  }
  // Signals, again and again, each time when the last one has been read.
  template <class Condition>
  [[nodiscard]] bool signal_until(const Condition& condition) {
    const auto end = Poller::Clock::now() + seconds(20);
    while (!condition()) {
      const int before = source->bursts.load();
      source->signal();
      if (!source->wait_bursts(before + 1) || Poller::Clock::now() > end) return false;
    }
    return true;
  }
  CoreDemand idle{[]() noexcept { return std::optional(false); }};
  const std::shared_ptr<Poller> poller = Poller::start("test", idle);
  const std::shared_ptr<Bursts> source = std::make_shared<Bursts>(*poller);
  void SetUp() override { poller->add(poller->new_id(), source->fd.get(), source); }
};

TEST_F(PollerStandsBy, WhatArrivesWhileNoThreadPollsIsRead) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(stand_by());
    std::this_thread::sleep_for(milliseconds(i % 4));
    const int before = source->bursts.load();
    source->signal();
    ASSERT_TRUE(source->wait_bursts(before + 1)) << i;
  }
}

TEST_F(PollerStandsBy, WorkThatBlocksIsHandedOffAndOtherMessagesAreRead) {
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(stand_by());
    source->handed_off = false;
    source->block = true;
    ASSERT_TRUE(signal_until([&] { return !source->block.load(); }));
    ASSERT_TRUE(wait_until([&] { return source->handed_off.load(); }, seconds(5))) << i;
  }
}

TEST_F(PollerStandsBy, JoinsAtOnce) {
  ASSERT_TRUE(stand_by());
  const auto begin = Poller::Clock::now();
  poller->join();
  EXPECT_LT(Poller::Clock::now() - begin, seconds(15));
}

}  // namespace
}  // namespace stitch::transport::stand_by_test
