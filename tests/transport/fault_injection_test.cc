// Faults on purpose: how they are written, and what they do to connections of every kind.
#include <signal.h>

#include "stitch/transport/faults/faults.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/plain_test.h"
#include "tests/transport/line.h"

namespace stitch::transport::fault_injection_test {
namespace {

using std::chrono::milliseconds;

std::string error_of(const std::string& text) {
  try {
    static_cast<void>(parse_fault_plan(text));
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
}

TEST(FaultPlan, ReadsEveryPart) {
  const auto plan = parse_fault_plan(
      "seed=7,drop=0.01,delay=10ms-50ms,duplicate=0.5,reorder=1,cut=2s,kill=ps0@step10,"
      "stop=ps1@time2s,kill=a:b@call1000,stop=ps0/12@step3,partition=ps0+ps1|t@2s-5s,"
      "partition=x|y");
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->seed, 7U);
  EXPECT_EQ(plan->drop, 0.01);
  EXPECT_EQ(plan->delay_from, milliseconds(10));
  EXPECT_EQ(plan->delay_to, milliseconds(50));
  EXPECT_EQ(plan->duplicate, 0.5);
  EXPECT_EQ(plan->reorder, 1);
  EXPECT_EQ(plan->cut, std::chrono::seconds(2));
  ASSERT_EQ(plan->strikes.size(), 4U);
  EXPECT_EQ(plan->strikes[0].worker, "ps0");
  EXPECT_EQ(plan->strikes[0].epoch, 1U);
  EXPECT_EQ(plan->strikes[0].at, FaultPlan::Strike::At::step);
  EXPECT_EQ(plan->strikes[0].count, 10U);
  EXPECT_TRUE(plan->strikes[0].kill);
  EXPECT_FALSE(plan->strikes[1].kill);
  EXPECT_EQ(plan->strikes[1].time, std::chrono::seconds(2));
  EXPECT_EQ(plan->strikes[2].worker, "a:b");
  EXPECT_EQ(plan->strikes[2].at, FaultPlan::Strike::At::call);
  EXPECT_EQ(plan->strikes[3].worker, "ps0");
  EXPECT_EQ(plan->strikes[3].epoch, 12U);
  EXPECT_EQ(plan->strikes[3].count, 3U);
  ASSERT_EQ(plan->partitions.size(), 2U);
  EXPECT_TRUE(plan->partitions[0].between("t", "ps1"));
  EXPECT_FALSE(plan->partitions[0].between("ps0", "ps1"));
  EXPECT_EQ(plan->partitions[0].from, std::chrono::seconds(2));
  EXPECT_EQ(plan->partitions[0].until, std::chrono::seconds(5));
  EXPECT_EQ(plan->partitions[1].until, FaultPlan::Duration::max());
  EXPECT_FALSE(parse_fault_plan(""));
}

TEST(FaultPlan, NamesThePartThatIsWrong) {
  EXPECT_EQ(
      error_of("drop=2"),
      "fault \"drop=2\" is not understood; drop takes a probability from 0 to 1, such as 0.01");
  EXPECT_EQ(error_of("seed=7,delay=fast"),
            "fault \"delay=fast\" is not understood; delay takes a duration, 50ms, or a range of "
            "them, 10ms-50ms");
  EXPECT_EQ(error_of("delay=5"), error_of("delay=5"));
  EXPECT_NE(error_of("delay=5"), "");
  EXPECT_NE(error_of("delay=50ms-10ms"), "");
  EXPECT_EQ(error_of("kill=ps0"),
            "fault \"kill=ps0\" is not understood; kill takes a worker and a moment: ps0@step10, "
            "ps0@call1000, ps0@time2s; with an epoch other than 1: ps0/2@step10");
  std::istringstream wrong(
      "kill=ps0@step kill=ps0@step0 kill=@step1 stop=a@minute3 kill=ps0@time kill=ps0@call-1 "
      "kill=ps0/@step1 kill=ps0/0@step1 kill=ps0/x@step1 kill=/1@step1 kill=ps0/1/2@step1 cut=0s "
      "seed=-1 seed=x partition=a partition=a| partition=a|b@5s-2s partition=a|a drop=nan drop= "
      "drop , drop=0.1,drop=0.2 drop=0.1,");
  for (std::string text; wrong >> text;) EXPECT_NE(error_of(text), "") << text;
  EXPECT_NE(error_of("dorp=0.1").find("fault \"dorp\" is unknown; there are "), std::string::npos);
  EXPECT_NE(error_of("dorp=0.1").find("did you mean drop?"), std::string::npos);
}

// The life of a worker "ps0" that does ten steps, serves ten calls and ends after `time`.
[[noreturn]] void live(const std::string& plan, std::uint64_t epoch, milliseconds time = {}) {
  const auto faults = Faults::make(*parse_fault_plan(plan), "ps0", epoch);
  for (int i = 0; i < 10; ++i) {
    faults->on_step();
    faults->on_call();
  }
  std::this_thread::sleep_for(time);
  std::_Exit(0);
}

TEST(FaultStrikes, MeetTheFirstLifeOfAWorkerUnlessTheyNameAnotherEpoch) {
  const ::testing::KilledBySignal killed(SIGKILL);
  const ::testing::ExitedWithCode lived(0);
  for (const std::string at : {"@step10", "@call10", "@time1us"}) {
    // Where it is to be killed after a time, it lives for long enough.
    EXPECT_EXIT(live("kill=ps0" + at, 1, milliseconds(20'000)), killed, "") << at;
    EXPECT_EXIT(live("kill=ps0" + at, 2), lived, "") << at;
    EXPECT_EXIT(live("kill=ps0/2" + at, 1), lived, "") << at;
    EXPECT_EXIT(live("kill=ps0/2" + at, 2, milliseconds(20'000)), killed, "") << at;
  }
  EXPECT_EXIT(live("kill=ps0@time1us", 2, milliseconds(50)), lived, "");
}

TEST(FaultStrikes, OfOtherLivesOnlySpareThisOne) {
  const auto spares = [](const std::string& plan, std::uint64_t epoch) {
    return Faults::make(*parse_fault_plan(plan), "ps0", epoch)->spares_this_life();
  };
  EXPECT_FALSE(spares("kill=ps0@step10", 1));
  EXPECT_TRUE(spares("kill=ps0@step10", 2));
  EXPECT_FALSE(spares("kill=ps0@step10,stop=ps0/2@time9h", 2));
  EXPECT_FALSE(spares("kill=ps1@step10", 2));
  EXPECT_FALSE(spares("seed=7", 2));
}

using MakeEndpoint = std::unique_ptr<Endpoint> (*)(std::uint32_t id);

std::unique_ptr<Endpoint> loopback(std::uint32_t id) {
  return make_loopback_endpoint(options(id), nullptr);
}
std::unique_ptr<Endpoint> shm(std::uint32_t id) {
  return make_stream_endpoint(options(id), {{"shm"}, "127.0.0.1"});
}
std::unique_ptr<Endpoint> tcp(std::uint32_t id) {
  return make_stream_endpoint(options(id), {{"tcp"}, "127.0.0.1"});
}

// Worker 2 has faults, worker 1 has none.
struct FaultyLine : Line {
  FaultyLine(MakeEndpoint make, const std::string& plan)
      : Line(make(1), with_faults(make(2), Faults::make(*parse_fault_plan(plan), "worker2"))) {}
};

class FaultInjection : public ::testing::TestWithParam<MakeEndpoint> {};
INSTANTIATE_TEST_SUITE_P(OverEach, FaultInjection, ::testing::Values(&loopback, &shm, &tcp));

// How many of 200 messages arrive before the connection is cut.
std::size_t delivered_before_drop(MakeEndpoint make, int seed) {
  FaultyLine line(make, "drop=0.05,seed=" + std::to_string(seed));
  // One after the other: what the transport has not written yet is lost with the connection.
  for (std::size_t i = 0; i < 200; ++i) {
    line.send(std::to_string(i));
    if (!line.server->wait_messages(i + 1)) break;
  }
  EXPECT_TRUE(line.server->wait_closed());
  EXPECT_TRUE(line.client->wait_closed());
  const auto texts = line.server->take_texts();
  for (std::size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(texts[i], std::to_string(i));
  EXPECT_EQ(line.client->failed(), 1U);
  return texts.size();
}

TEST_P(FaultInjection, ADroppedMessageCutsTheConnectionAtTheSameOneForEachSeed) {
  const auto first = delivered_before_drop(GetParam(), 7);
  EXPECT_LT(first, 200U);
  EXPECT_EQ(delivered_before_drop(GetParam(), 7), first);
  std::vector<std::size_t> others;
  for (int seed = 8; seed < 12; ++seed) others.push_back(delivered_before_drop(GetParam(), seed));
  EXPECT_TRUE(std::any_of(others.begin(), others.end(), [&](auto each) { return each != first; }));
}

TEST_P(FaultInjection, DelayedMessagesArriveLaterAndInOrder) {
  FaultyLine line(GetParam(), "delay=20ms-60ms");
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> expected;
  for (int i = 0; i < 50; ++i) {
    line.send(std::to_string(i));
    expected.push_back(std::to_string(i));
  }
  ASSERT_TRUE(line.server->wait_messages(50));
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(20));
  EXPECT_EQ(line.server->take_texts(), expected);
}

TEST_P(FaultInjection, ADuplicateIsAMessageThatArrivesBeforeTheConnectionIsCut) {
  FaultyLine line(GetParam(), "duplicate=1");
  line.send("only");
  ASSERT_TRUE(line.client->wait_closed());
  ASSERT_TRUE(line.server->wait_closed());
  EXPECT_EQ(line.client->failed(), 0U);
  EXPECT_EQ(line.client->closed_code(), ErrorCode::disconnected);
  EXPECT_EQ(line.server->take_texts(), std::vector<std::string>{"only"});
}

TEST_P(FaultInjection, OnlyLargeMessagesAreOvertaken) {
  const std::vector<std::string> small{"0", "1", "2", "3", "4"};
  bool in_time = false;
  // It is held back for 10 ms only: a thread that stands still for so long sees nothing.
  for (int i = 0; i < 20 && !in_time; ++i) {
    FaultyLine line(GetParam(), "reorder=1");
    const auto start = std::chrono::steady_clock::now();
    line.to_server->send(make_message(std::string(100'000, 'x')), line.client->done());
    for (const auto& each : small) line.send(each);
    in_time = std::chrono::steady_clock::now() - start < milliseconds(10);
    ASSERT_TRUE(line.server->wait_messages(6));
    auto texts = line.server->take_texts();
    if (in_time) {
      EXPECT_EQ(texts.back().size(), 100'000U) << "all were sent while it was held back";
    }
    std::erase_if(texts, [](const auto& text) { return text.size() == 100'000U; });
    EXPECT_EQ(texts, small);
  }
  EXPECT_TRUE(in_time) << "this thread was never fast enough";
}

TEST_P(FaultInjection, ConnectionsAreCutAfterAWhile) {
  FaultyLine line(GetParam(), "cut=20ms");
  ASSERT_TRUE(line.client->wait_closed());
  ASSERT_TRUE(line.server->wait_closed());
  EXPECT_NE(line.client->closed_text().find("was cut on purpose (fault cut)"), std::string::npos);
}

TEST_P(FaultInjection, APartitionHoldsMessagesBackUntilItEnds) {
  const auto start = std::chrono::steady_clock::now();
  FaultyLine line(GetParam(), "partition=worker2|worker1@0s-400ms");
  line.send("late");
  ASSERT_TRUE(line.server->wait_messages(1));
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(400));
  EXPECT_EQ(line.server->take_texts(), std::vector<std::string>{"late"});
}

TEST_P(FaultInjection, WhatIsHeldBackFailsWithItsConnection) {
  FaultyLine line(GetParam(), "partition=worker2|worker1");
  for (int i = 0; i < 3; ++i) line.send("never");
  line.to_server->close(Error(ErrorCode::cancelled, "done waiting"));
  ASSERT_TRUE(line.client->wait_sends_done());
  EXPECT_EQ(line.client->failed(), 3U);
  ASSERT_TRUE(line.server->wait_closed());
  EXPECT_EQ(line.server->received(), 0U);
}

// There is no network in between, and no other connection takes its place.
TEST(FaultInjectionPlan, DoesNotCutTheConnectionOfAWorkerToItself) {
  Line line(loopback(1),
            with_faults(loopback(2),
                        Faults::make(*parse_fault_plan("drop=1,duplicate=1,cut=1us"), "worker1")));
  for (std::size_t i = 0; i < 50; ++i) {
    line.send(std::to_string(i));
    ASSERT_TRUE(line.server->wait_messages(i + 1));
  }
  EXPECT_EQ(line.client->failed(), 0U);
}

// ---- judges: a test decides message by message

std::unique_ptr<Endpoint> judged(std::uint32_t id) {
  Faults::expect_judges();
  return with_faults(loopback(id), Faults::make({}, "worker" + std::to_string(id), 1, id));
}

struct JudgedLine : Line {
  JudgedLine() : Line(judged(1), judged(2)) {}
};

class Judges : public ::testing::Test {
 protected:
  ~Judges() override { Faults::set_judge(nullptr); }
  // Of the k-th message from now on.
  static Faults::Judge fate_of(std::uint64_t k, Fate fate) {
    return [k, fate, count = std::make_shared<std::atomic<std::uint64_t>>(0)](
               std::uint32_t, std::uint32_t, std::uint64_t, const Message&) {
      return count->fetch_add(1) == k ? fate : Fate{};
    };
  }
};

TEST_F(Judges, ADroppedMessageIsLostForTheReceiverOnly) {
  for (std::uint64_t k = 0; k < 5; ++k) {
    JudgedLine line;
    Faults::set_judge(fate_of(k, {.drop = true}));
    std::vector<std::string> expected;
    for (std::uint64_t i = 0; i < 5; ++i) {
      line.send(std::to_string(i));
      if (i != k) expected.push_back(std::to_string(i));
    }
    ASSERT_TRUE(line.server->wait_messages(4));
    EXPECT_EQ(line.server->take_texts(), expected);
    ASSERT_TRUE(line.client->wait_sends_done());
    EXPECT_EQ(line.client->failed(), 0U);
  }
}

TEST_F(Judges, AFailedMessageBreaksTheConnectionAtBothEnds) {
  for (std::uint64_t k = 0; k < 5; ++k) {
    JudgedLine line;
    Faults::set_judge(fate_of(k, {.fail = true}));
    for (std::uint64_t i = 0; i < 5; ++i) line.send(std::to_string(i));
    ASSERT_TRUE(line.client->wait_closed());
    ASSERT_TRUE(line.server->wait_closed());
    EXPECT_EQ(line.client->closed_code(), ErrorCode::disconnected);
    EXPECT_EQ(line.server->closed_code(), ErrorCode::disconnected);
    ASSERT_TRUE(line.client->wait_sends_done());
    EXPECT_EQ(line.client->failed(), 5 - k);
    EXPECT_LE(line.server->received(), k);
  }
}

TEST_F(Judges, ADuplicatedMessageArrivesThatOften) {
  JudgedLine line;
  Faults::set_judge(fate_of(1, {.copies = 3}));
  for (int i = 0; i < 3; ++i) line.send(std::to_string(i));
  ASSERT_TRUE(line.server->wait_messages(5));
  EXPECT_EQ(line.server->take_texts(), (std::vector<std::string>{"0", "1", "1", "1", "2"}));
  ASSERT_TRUE(line.client->wait_sends_done());
  EXPECT_EQ(line.client->done_count(), 3U);
}

TEST_F(Judges, ADelayedMessageIsOvertaken) {
  JudgedLine line;
  const auto start = std::chrono::steady_clock::now();
  Faults::set_judge([count = std::make_shared<std::atomic<int>>(0)](std::uint32_t, std::uint32_t,
                                                                    std::uint64_t, const Message&) {
    const int number = (*count)++;
    return Fate{.delay = milliseconds(number == 0 ? 400 : number == 1 ? 200 : 0)};
  });
  for (int i = 0; i < 4; ++i) line.send(std::to_string(i));
  ASSERT_TRUE(line.server->wait_messages(4));
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(400));
  EXPECT_EQ(line.server->take_texts(), (std::vector<std::string>{"2", "3", "1", "0"}));
}

TEST_F(Judges, TheJudgeSeesWhoSendsWhatToWhomButNoHandshakes) {
  JudgedLine line;
  base::Mutex mutex;
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::string>> seen;
  Faults::set_judge(
      [&](std::uint32_t from, std::uint32_t to, std::uint64_t sequence, const Message& message) {
        base::MutexLock lock(mutex);
        seen.emplace_back(from, to, sequence, text_of(message));
        return Fate{};
      });
  line.send("up");
  line.server->connection()->send(make_message("down"), nullptr);
  ASSERT_TRUE(line.client->wait_messages(1));
  base::MutexLock lock(mutex);
  ASSERT_EQ(seen.size(), 2U);
  const std::uint64_t first = std::get<2>(seen[0]);
  EXPECT_EQ(seen[0], std::make_tuple(2U, 1U, first, std::string("up")));
  EXPECT_EQ(seen[1], std::make_tuple(1U, 2U, first + 1, std::string("down")));
}

}  // namespace
}  // namespace stitch::transport::fault_injection_test
