#include "stitch/rpc/agent/thread_report.h"

#include <algorithm>
#include <chrono>

#include "stitch/rpc/agent/call_table.h"
#include "stitch/rpc/message/archive.h"

namespace stitch::rpc {

namespace {

// Identifiers may have any other byte.
bool is_control(char c) noexcept {
  const auto byte = static_cast<unsigned char>(c);
  return byte < 0x20 || byte == 0x7f;
}

}  // namespace

void ThreadReport::write(OutMessage& message) const {
  OutArchive archive(message);
  archive(state, ns, threads, holders);
}

ThreadReport ThreadReport::read(InMessage& message) {
  InArchive archive(message, message.view.body().subspan(sizeof(std::uint64_t)));
  ThreadReport report;
  archive(report.state, report.ns, report.threads, report.holders);
  archive.expect_end();
  if (report.holders.size() > kHolders)
    throw Error(ErrorCode::protocol, "a report about threads names too many functions");
  for (const Holder& holder : report.holders) {
    if (holder.function.size() > kMaxName || std::ranges::any_of(holder.function, is_control))
      throw Error(ErrorCode::protocol, "a report about threads names what is no function");
  }
  return report;
}

std::string ThreadReport::text() const {
  const std::string time = duration_text(std::chrono::nanoseconds(ns));
  if (state == running) return "call has been running there for " + time;
  if (state == waiting) return "call has been waiting in its function there for " + time;
  if (state != queued) return "";
  std::string text = "call was queued " + time + " there";
  const char* before = " behind ";
  for (const Holder& holder : holders) {
    text += before + holder.function + "() (running " +
            duration_text(std::chrono::nanoseconds(holder.longest_ns)) + " on " +
            std::to_string(holder.threads) + " of " + std::to_string(threads) + " threads)";
    before = " and ";
  }
  return text;
}

}  // namespace stitch::rpc
