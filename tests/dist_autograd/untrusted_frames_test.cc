// What a worker that lies may say about passes and contexts.
#include "stitch/base/byte_io.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rpc/message/message.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::untrusted_frames_test {
namespace {

using dist_autograd::Context;
using dist_autograd::ContextId;
using dist_autograd::Engine;
using namespace std::chrono_literals;
namespace autograd_wire = dist_autograd::wire;

// Waits in backward.
Gate gate;
struct Waits : torch::autograd::Function<Waits> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    gate.pass();
    return grads;
  }
};
at::Tensor waits_in_backward(at::Tensor x) { return Waits::apply(x * own_parameter()); }
at::Tensor waits_behind(std::string next, at::Tensor x) {
  return rpc_sync<waits_in_backward>(next, x * own_parameter());
}

template <class... Parts>
void send_as(Worker& from, int to, std::uint16_t kind, const Parts&... parts) {
  const WorkerScope scope(from);
  rpc::OutMessage out(kind);
  rpc::OutArchive archive(out);
  (archive(parts), ...);
  const auto agent = rpc::current_agent();
  agent->send_control(agent->peers().find(WorkerId(static_cast<std::uint32_t>(to))),
                      std::move(out));
}

class ForeignWords : public ::testing::Test {
 protected:
  // A pass of worker0 that runs on worker1 and waits on worker2; worker3 takes no part.
  void start() {
    cluster.emplace(4);
    begin();
  }
  void begin() {
    gate.close();
    context.emplace();
    const auto loss = rpc_sync<waits_behind>("worker1", "worker2", ones().requires_grad_()).sum();
    pass = context->backward_async({loss});
    ASSERT_TRUE(gate.wait_for_arrival());
  }
  autograd_wire::PassHeader header() {
    return {context->id(), {(*cluster)[0].id(), context->id().epoch, 1}};
  }
  void expect_protocol_error(const std::string& text) {
    const auto error = error_of([&] { pass.get(); });
    EXPECT_TRUE(has_text(error, ErrorCode::protocol, text));
    gate.open();
  }
  void TearDown() override {
    gate.open();
    context.reset();
  }
  std::optional<Cluster> cluster;
  std::optional<Context> context;
  Future<void> pass;
};

// GRADIENTS of no link, with this ACK.
void send_riding(Worker& from, int to, const autograd_wire::PassHeader& header,
                 const autograd_wire::Ack& ack) {
  send_as(from, to, autograd_wire::kGradients, header, ack,
          std::vector<autograd_wire::GradientEntry>{}, std::vector<at::Tensor>{});
}

TEST_F(ForeignWords, ThatNoCorrectWorkerSendsEndThePass) {
  namespace wire = autograd_wire;
  const wire::OlderPasses no_older;
  const wire::Mark first_link{{1}};  // worker2's, which leads to worker1
  struct Case {
    const char* text;  // of the error
    std::function<void(Cluster&, wire::PassHeader)> send;
  };
  const std::vector<Case> cases{
      {"closed the marking of another worker's pass",
       [&](Cluster& by, const auto& of) { send_as(by[3], 2, wire::kCloseMarking, of, no_older); }},
      {"closed a marking that had not begun",
       [&](Cluster& by, const auto& of) { send_as(by[0], 2, wire::kCloseMarking, of, no_older); }},
      {"ended the gradients of another worker's pass",
       [&](Cluster& by, const auto& of) { send_as(by[3], 2, wire::kQuiet, of, no_older); }},
      {"sent QUIET while gradients were in flight",
       [&](Cluster& by, const auto& of) { send_as(by[0], 2, wire::kQuiet, of, no_older); }},
      {"sent a MARK while gradients were in flight",
       [&](Cluster& by, const auto& of) { send_as(by[1], 2, wire::kMark, of, first_link); }},
      {"which was sent to another worker",
       [&](Cluster& by, const auto& of) { send_as(by[3], 2, wire::kMark, of, first_link); }},
      {"acknowledged more messages than it was sent",
       [&](Cluster& by, const auto& of) {
         send_as(by[3], 0, wire::kAck, of, wire::Ack{1, {}});
       }},
      {"acknowledged more messages than it was sent",
       [&](Cluster& by, const auto& of) {
         send_riding(by[3], 0, of, {1, {}});
       }},
      {"named participants, but acknowledged nothing",
       [&](Cluster& by, const auto& of) {
         send_riding(by[3], 0, of, {0, {by[3].id()}});
       }},
      {"have more tensors than they name",
       [&](Cluster& by, const auto& of) {
         send_as(by[3], 0, wire::kGradients, of, wire::Ack{}, std::vector<wire::GradientEntry>{},
                 std::vector<at::Tensor>{ones()});
       }},
      {"is done with a pass that does not wait for it",
       [&](Cluster& by, const auto& of) { send_as(by[3], 0, wire::kDone, of); }},
      {"the flags of the pass differ",
       [&](Cluster& by, auto of) {
         of.flags = wire::PassHeader::kRetainGraph;
         send_as(by[1], 2, wire::kMark, of, first_link);
       }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.text);
    start();
    each.send(*cluster, header());
    expect_protocol_error(each.text);
    context.reset();
  }
}

TEST_F(ForeignWords, OfOlderPassesThatAreNotTheSendersEndNone) {
  start();
  const auto heard = [&] { return (*cluster)[2].debug_info().at("rpc.messages_received"); };
  const auto before = heard();
  auto later = header();
  later.pass.counter = 100;
  for (const auto kind : {autograd_wire::kQuiet, autograd_wire::kCloseMarking})
    send_as((*cluster)[3], 2, kind, later, autograd_wire::OlderPasses{});
  EXPECT_TRUE(eventually([&] { return heard() >= before + 2; }));
  gate.open();
  pass.get();
  const auto loss = rpc_sync<times_parameter>("worker2", ones().requires_grad_()).sum();
  context->backward({loss}, {.timeout = 20s});
}

TEST_F(ForeignWords, OfOlderPassesThatAreNotOlderOrInNoOrderEndThePass) {
  for (const auto& open :
       std::vector<std::vector<std::uint64_t>>{{1}, {7}, {0, 0}, std::vector<std::uint64_t>(600)}) {
    start();
    send_as((*cluster)[0], 2, autograd_wire::kQuiet, header(), autograd_wire::OlderPasses{open});
    expect_protocol_error("named older passes");
    context.reset();
  }
}

TEST_F(ForeignWords, ParticipantsThatDoNotExistEndThePass) {
  for (const bool ride : {false, true}) {
    start();
    const autograd_wire::Ack ack{1, {WorkerId(77)}};
    if (ride) {
      send_riding((*cluster)[1], 0, header(), ack);
    } else {
      send_as((*cluster)[1], 0, autograd_wire::kAck, header(), ack);
    }
    const auto error = error_of([&] { pass.get(); });
    EXPECT_TRUE(contains(error.what(), "77")) << error.what();
    gate.open();
    context.reset();
  }
}

TEST_F(ForeignWords, APassOfThisWorkerThatItHasNotBegunIsNotOpened) {
  start();
  const auto heard = [&] { return (*cluster)[3].debug_info().at("rpc.messages_received"); };
  const auto before = heard();
  for (const std::uint64_t counter : {2, 99}) {  // 2 is that of the next pass
    auto unknown = header();
    unknown.pass.counter = counter;
    send_as((*cluster)[3], 0, autograd_wire::kMark, unknown, autograd_wire::Mark{});
  }
  // Each is refused by an ABORT, before that pass begins.
  EXPECT_TRUE(eventually([&] { return heard() >= before + 2; }));
  gate.open();
  pass.get();
  const auto loss = rpc_sync<times_parameter>("worker1", ones().requires_grad_()).sum();
  context->backward({loss}, {.timeout = 20s});
  const WorkerScope scope((*cluster)[0]);
  context.reset();  // waits for every pass that is open here
  EXPECT_TRUE(eventually([&] { return count_on((*cluster)[0], "contexts") == 0; }));
}

TEST_F(ForeignWords, ReleaseIsAcceptedFromTheHomeAndFromAWorkerThatToldOfTheContext) {
  start();
  const autograd_wire::Release release{context->id(), 1000, 1};
  send_as((*cluster)[3], 2, autograd_wire::kRelease, release);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(count_on((*cluster)[2], "contexts"), 1);
  gate.open();
  pass.get();
  EXPECT_TRUE(
      equal_gradients(gradient_on((*cluster)[2], context->id()), parameter_of((*cluster)[1])));
  const WorkerScope scope((*cluster)[0]);
  context.reset();
  EXPECT_TRUE(eventually([&] { return count_on((*cluster)[2], "contexts") == 0; }));
}

// A message was lost, which a graceful end would wait for.
void end_at_once(Cluster& cluster) {
  for (int i = 0; i < cluster.size(); ++i) {
    try {
      cluster[i].shutdown({.graceful = false, .timeout = 5s});
    } catch (const Error&) {
    }
  }
}

// Worker1 does its part, but its answer names worker2, too, which would never be done.
TEST(ForeignWordsFaults, ThatNameAParticipantWhichTakesNoPartEndThePass) {
  for (const bool knows_the_context : {false, true}) {
    Cluster cluster(3);
    {
      Context context;
      if (knows_the_context) rpc_sync<times_parameter>("worker2", ones());
      const auto loss = rpc_sync<times_parameter>("worker1", ones()).sum();
      std::atomic<bool> taken{false};
      const LoopbackFaults faults([&](std::uint32_t from, std::uint32_t, std::uint64_t,
                                      const transport::Message& message) {
        transport::Fate fate;
        fate.drop = from == 1 && kind_of(message) == autograd_wire::kAck && !taken.exchange(true);
        return fate;
      });
      const auto pass = context.backward_async({loss});
      ASSERT_TRUE(eventually([&] { return taken.load(); }));
      send_as(cluster[1], 0, autograd_wire::kAck,
              autograd_wire::PassHeader{context.id(), {cluster[0].id(), context.id().epoch, 1}},
              autograd_wire::Ack{1, {cluster[1].id(), cluster[2].id()}});
      const auto error = error_of([&] { pass.get(); });
      EXPECT_EQ(error.worker(), "worker2");
      EXPECT_TRUE(
          knows_the_context
              ? has_text(error, ErrorCode::protocol, "in which it takes no part")
              : has_text(error, ErrorCode::cancelled, "was released on worker \"worker2\""));
      EXPECT_TRUE(refuses(cluster[1], context.id(), error.code()));
    }
    end_at_once(cluster);
  }
}

TEST(ForeignContexts, OfWorkersOrLivesThatDoNotExistAreRefused) {
  Cluster cluster(2);
  const auto self = rpc::current_agent();
  for (const ContextId& id :
       {ContextId{WorkerId(77), 0, 1}, ContextId{self->self().id, self->self().epoch + 1, 1}}) {
    // Joined here as if a call had carried it.
    const auto made = Engine::of(*self).contexts().find_or_join(id);
    ASSERT_TRUE(made);
    const auto scope = dist_autograd::context_scope(id);
    const auto error = error_of([&] { rpc_sync<times_parameter>("worker1", ones()); });
    EXPECT_TRUE(has_text(error, ErrorCode::disconnected, "not known here"));
    EXPECT_EQ(count_on(cluster[1], "contexts"), 0);
    // A third worker may have made it up, and told this one of it: it is not lost for that.
    send_as(cluster[0], 1, autograd_wire::kRelease, autograd_wire::Release{id, 0, 0});
  }
  EXPECT_EQ(rpc_sync<times_parameter>("worker1", ones()).numel(), ones().numel());
}

// A worker that guesses the next contexts of another one, calls under them and ends them.
TEST(ForeignContexts, ToComeAreEndedByTheirHomeOnly) {
  for (const bool calls : {false, true}) {
    SCOPED_TRACE(calls);
    Cluster cluster(3);
    ContextId next;
    {
      const Context context;
      next = context.id();
    }
    for (int i = 0; i < 3; ++i) {
      ++next.counter;
      if (calls) {
        const WorkerScope liar(cluster[1]);
        const auto made = Engine::of(*rpc::current_agent()).contexts().find_or_join(next);
        const auto scope = dist_autograd::context_scope(next);
        rpc_sync<times_parameter>("worker2", ones().requires_grad_());
      }
      send_as(cluster[1], 2, autograd_wire::kRelease,
              autograd_wire::Release{next, 0, next.counter});
    }
    {
      const WorkerScope liar(cluster[1]);
      rpc_sync<times_parameter>("worker2", ones());  // behind what it has said
    }
    for (int i = 0; i < 3; ++i) {
      Context context;
      const auto loss = rpc_sync<times_parameter>("worker2", ones().requires_grad_()).sum();
      context.backward({loss}, {.timeout = 20s});
      EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), ones())) << i;
    }
  }
}

TEST(ForeignContexts, ThatOneWorkerHasToldAreNotWithoutNumber) {
  const WorkerInfo liar{"liar", WorkerId(1), 1};
  const WorkerInfo other{"other", WorkerId(2), 1};
  dist_autograd::ContextTable table(WorkerId(0), 1);
  const auto join = [&](std::uint64_t counter, const WorkerInfo& teller) {
    return table.find_or_join({WorkerId(5), 1, counter}, teller);
  };
  for (std::uint64_t i = 1; i <= table.kMaxTold; ++i) ASSERT_TRUE(join(i, liar));
  EXPECT_EQ(error_of([&] { static_cast<void>(join(table.kMaxTold + 1, liar)); }).code(),
            ErrorCode::overloaded);
  EXPECT_TRUE(join(7, liar));
  EXPECT_TRUE(join(table.kMaxTold + 1, other));
  EXPECT_TRUE(table.remove_told_by({WorkerId(5), 1, 7}, liar));
  EXPECT_FALSE(join(7, liar));
  EXPECT_TRUE(join(7, other));
  EXPECT_TRUE(join(table.kMaxTold + 2, liar));
}

TEST(ForeignContexts, HaveALimitedNumberOfPasses) {
  dist_autograd::ContextState context({WorkerId(1), 1, 1});
  const auto open = [&](std::uint64_t counter) {
    return context.open_pass({WorkerId(1), 1, counter},
                             [] { return std::shared_ptr<dist_autograd::Pass>(); });
  };
  for (std::uint64_t i = 1; i <= context.kMaxPasses; ++i) static_cast<void>(open(i));
  EXPECT_EQ(error_of([&] { static_cast<void>(open(0)); }).code(), ErrorCode::overloaded);
  context.close_pass({WorkerId(1), 1, 1});
  static_cast<void>(open(context.kMaxPasses + 1));
}

// Adds its section to every request that this process sends.
base::Bytes& forged_section() {
  static base::Bytes bytes;
  return bytes;
}
class Forger final : public rpc::Extension {
 public:
  void on_send(rpc::OutMessage& message, const WorkerInfo&) override {
    if (forged_section().size() > 0 && message.frame.kind() == rpc::wire::kRequest)
      message.frame.add_section(autograd_wire::kContextSection, forged_section().span());
  }
};
const int kForger = rpc::register_extension(
    [](rpc::Agent&) -> std::unique_ptr<rpc::Extension> { return std::make_unique<Forger>(); });

TEST(ForeignContexts, NamingATensorTwiceAreRefused) {
  static_cast<void>(kForger);
  Cluster cluster(2);
  base::ByteWriter out(forged_section());
  out.write(cluster[0].id().value());
  out.write(rpc::current_agent()->self().epoch);
  out.write(std::uint64_t{1});
  out.write(std::uint64_t{1});
  out.write(std::uint32_t{2});
  out.write(std::uint32_t{0});
  out.write(std::uint32_t{0});
  const auto error =
      error_of([&] { rpc_sync<times_parameter>("worker1", ones().requires_grad_()); });
  forged_section() = {};
  EXPECT_TRUE(has_text(error, ErrorCode::protocol, "names its tensors in no order"));
}

}  // namespace
}  // namespace stitch::testing::untrusted_frames_test
