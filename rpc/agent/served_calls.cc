#include "stitch/rpc/agent/served_calls.h"

#include <optional>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/name_list.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/agent/post_where_read.h"
#include "stitch/rpc/agent/unknown_function.h"
#include "stitch/rpc/message/archive.h"

namespace stitch::rpc {

namespace {

// With that much control traffic waiting for a peer, answers to it carry no lists of names.
constexpr std::size_t kManyControlBytes = 1 << 20;
// How long after its deadline a call is stopped. Callers cancel their calls at the deadline, unless
// they are stopped or cut off; so a handler does not answer the moment its caller gives up.
constexpr std::chrono::milliseconds kCallerGrace{10};

}  // namespace

ServedCalls::ServedCalls(const Options& options, const AgentState& state, const WorkerInfo& self,
                         const Extensions& extensions, Sender& sender, ThreadPool& pool,
                         std::string thread_name)
    : options_(options),
      state_(state),
      self_(self),
      extensions_(extensions),
      sender_(sender),
      pool_(pool),
      stop_callbacks_(options.num_threads, std::move(thread_name)) {}

void ServedCalls::start(const std::shared_ptr<Agent>& agent,
                        const std::shared_ptr<base::EventLoop>& loop) {
  agent_ = agent;
  watch_ = std::make_shared<DeadlineWatch>(loop, [this, weak = agent_] {
    if (const auto alive = weak.lock()) expire();
  });
}

void ServedCalls::on_request(const std::shared_ptr<transport::Connection>& connection,
                             InMessage message) {
  base::ByteReader in(message.view.body(), "request");
  CallHeader header;
  header.call_id = in.read<std::uint64_t>();
  header.function_id = in.read<std::uint64_t>();
  header.timeout_ns = in.read<std::int64_t>();
  for (const auto& extension : extensions_) extension->on_receive(message);
  const auto call = std::allocate_shared<IncomingCall>(base::RecyclingAllocator<IncomingCall>(),
                                                       std::shared_ptr<Agent>(agent_), connection,
                                                       std::move(message), header);
  const std::size_t waiting = bytes_.fetch_add(call->bytes()) + call->bytes();
  switch (table_.add(call)) {
    case IncomingTable::Added::serve:
      break;
    case IncomingTable::Added::cancelled:
      call->request_stop();  // it will not be run
      break;
    case IncomingTable::Added::duplicate:
      call->leave_unanswered();
      throw Error(ErrorCode::protocol,
                  "request " + std::to_string(header.call_id) + " is being served already");
  }
  watch(call->deadline());
  if (const auto why = refusal(*call, waiting)) {
    call->fail(*why);
    return;
  }
  for (const auto& extension : extensions_) {
    if (extension->take_over(call)) return;
  }
  if (call->function() == nullptr || call->function()->object_type != nullptr) {
    call->fail(
        Error(ErrorCode::protocol, "the request names no function that can run without an object"));
    return;
  }
  dispatch(call, [call] { call->run(); });
}

std::optional<Error> ServedCalls::refusal(const IncomingCall& call, std::size_t waiting) const {
  if (waiting > options_.max_inflight_bytes) {
    return Error(ErrorCode::overloaded, "calls waiting there exceed max_inflight_bytes " +
                                            std::to_string(options_.max_inflight_bytes));
  }
  if (state_.stopped())
    return Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down");
  if (call.names_function() && call.function() == nullptr) {
    // A caller that sends small requests and does not read must not make large answers pile up.
    const bool reads = sender_.control_bytes(call.caller()) < kManyControlBytes;
    return Error(ErrorCode::unimplemented, reads ? registered_function_names() : std::string());
  }
  return std::nullopt;
}

void ServedCalls::dispatch(const std::shared_ptr<IncomingCall>& call,
                           base::UniqueFunction<void()> task) {
  if (call->function() != nullptr && call->function()->run_inline) {
    task();
    return;
  }
  if (!post_where_read(call->connection(), pool_, std::shared_ptr<Agent>(agent_), task))
    call->fail(Error(ErrorCode::shutting_down, to_string(self_) + " is shutting down"));
}

void ServedCalls::refuse(const std::shared_ptr<transport::Connection>& connection,
                         const WorkerInfo& from, std::uint64_t call_id, const Error& error) {
  if (call_id == 0) return;  // one-way
  OutMessage message(wire::kErrorReply);
  base::ByteWriter(message.frame.body()).write(call_id);
  OutArchive archive(message);
  archive(error);
  sender_.send_reply(from, connection, std::move(message));
}

void ServedCalls::on_cancel(const InMessage& message) {
  base::ByteReader in(message.view.body(), "cancel");
  if (const auto call = table_.cancel(message.from.id, in.read<std::uint64_t>()))
    call->request_stop();
}

void ServedCalls::on_peer_lost(const WorkerInfo& peer) {
  for (const auto& call : table_.list(peer.id)) call->request_stop();
}

void ServedCalls::forget(const IncomingCall& call) {
  table_.remove(call);
  bytes_.fetch_sub(call.bytes());
}

void ServedCalls::stop_all() {
  for (const auto& call : table_.list(std::nullopt)) call->request_stop();
}

std::uint64_t ServedCalls::busy() const {
  std::uint64_t busy = 0;
  for (const auto& call : table_.list(std::nullopt)) busy += call->stop_requested() ? 0 : 1;
  return busy;
}

std::string ServedCalls::running() const {
  std::vector<std::string> names;
  for (const auto& call : table_.list(std::nullopt)) {
    if (call->function() != nullptr) names.push_back(call->function()->name + "()");
  }
  return base::join_names(names);
}

void ServedCalls::watch(Clock::time_point deadline) {
  if (deadline < Clock::time_point::max() - kCallerGrace) watch_->watch(deadline + kCallerGrace);
}

void ServedCalls::expire() {
  const auto expired = table_.expired(Clock::now() - kCallerGrace);
  watch(expired.next);
  for (const auto& call : expired.calls) call->request_stop();
}

}  // namespace stitch::rpc
