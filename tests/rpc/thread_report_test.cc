// What a callee says about a call that takes long, and how much of it the caller keeps.
#include "stitch/rpc/agent/thread_report.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/agent/call_table.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "tests/support/error_of.h"

namespace stitch::rpc::thread_report_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::error_of;

// As it arrives from a callee that names this function.
ThreadReport received(const std::string& function) {
  ThreadReport report;
  report.state = ThreadReport::queued;
  report.holders.push_back({function, 1, 1});
  OutMessage out(wire::kThreads);
  base::ByteWriter(out.frame.body()).write(std::uint64_t{1});
  report.write(out);
  out.frame.end_body();
  InMessage in(std::move(out.frame).finish(), {});
  return ThreadReport::read(in);
}

TEST(ThreadReports, NamesThatAreTooLongOrOfControlCharactersAreRefused) {
  const std::string longest(ThreadReport::kMaxName, 'f');
  EXPECT_EQ(received(longest).holders.at(0).function, longest);
  EXPECT_EQ(received("größe<int, char*>").holders.at(0).function, "größe<int, char*>");
  for (const std::string& name : {longest + 'f', std::string("f\n"), std::string("\x1b[2J"),
                                  std::string(1, '\0'), std::string("\x7f")}) {
    const Error error = error_of([&] { static_cast<void>(received(name)); });
    EXPECT_EQ(error.code(), ErrorCode::protocol);
    EXPECT_STREQ(error.what(), "a report about threads names what is no function");
  }
}

TEST(CallTables, KeepOneAnswerToEachQuestion) {
  const WorkerInfo callee{"worker1", WorkerId(1), 1};
  const WorkerInfo other{"worker2", WorkerId(2), 1};
  const auto now = CallTable::Clock::now();
  OutstandingCall call;
  call.to = &callee;
  call.timeout = 100ms;
  call.deadline = now + 100ms;
  call.begun = true;
  CallTable table;
  const auto id = table.add(std::move(call));
  const auto answer = [&](const WorkerInfo& from, const char* text) {
    table.note_answered(id, from, std::make_unique<std::string>(text));
  };
  answer(callee, "before it is asked");
  const auto due = table.take_expired(now + 80ms);
  ASSERT_EQ(due.asked, 1U);
  EXPECT_EQ(due.to_ask[0].first, id);
  answer(other, "not its own");
  answer(callee, "first");
  answer(callee, "second");
  const auto taken = table.take(id);
  ASSERT_TRUE(taken && taken->answered);
  EXPECT_EQ(*taken->answered, "first");
}

}  // namespace
}  // namespace stitch::rpc::thread_report_test
