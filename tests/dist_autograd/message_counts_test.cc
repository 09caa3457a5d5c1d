// How many messages a backward pass takes, and how large they are. PROTOCOL.md has the table.
#include "stitch/dist_autograd/protocol/messages.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/world_test.h"

namespace stitch::testing::message_counts_test {
namespace {

using dist_autograd::Context;
namespace autograd_wire = dist_autograd::wire;
using autograd_wire::FrameKind;

constexpr std::size_t kLength = 5;

struct Counts {
  std::array<std::size_t, 16> messages{};
  std::array<std::size_t, 16> bytes{};  // of the bodies
  std::size_t data = 0;                 // with tensors and all, of all messages
  [[nodiscard]] std::size_t of(FrameKind kind) const { return messages[kind & 15]; }
  // Of messages of that kind that are all of one size.
  [[nodiscard]] std::size_t size_of(FrameKind kind) const {
    return of(kind) == 0 ? 0 : bytes[kind & 15] / of(kind);
  }
};

// What `backward()` on `roots` sends, on all workers; counted until all of it has arrived.
Counts sent_by(const Context& context, const at::Tensor& root,
               const dist_autograd::Options& options = {}) {
  std::mutex mutex;
  Counts counts;
  {
    const LoopbackFaults watch(
        [&](std::uint32_t, std::uint32_t, std::uint64_t, const transport::Message& message) {
          const auto kind = kind_of(message);
          if (kind >= autograd_wire::kFirstKind && kind <= autograd_wire::kLastKind) {
            const std::lock_guard lock(mutex);
            ++counts.messages[kind & 15];
            counts.bytes[kind & 15] += transport::FrameView(message).body().size();
            counts.data += message.frame.size();
            for (const auto& buffer : message.buffers) counts.data += buffer.bytes;
          }
          return transport::Fate{};
        });
    context.backward({root}, options);
  }
  const std::lock_guard lock(mutex);
  return counts;
}

// A call after another to one worker, each with the result of the one before.
at::Tensor chain(at::Tensor x) {
  for (std::size_t i = 0; i < kLength; ++i) x = rpc_sync<times_parameter>("worker1", x);
  return x.sum();
}

// Calls within calls, kLength deep.
at::Tensor nested(at::Tensor x) {
  std::vector<std::string> path;
  for (std::size_t i = 2; i <= kLength; ++i) path.push_back("worker" + std::to_string(i));
  return rpc_sync<via>("worker1", path, x).sum();
}

// GRADIENTS that leave before a strand is quiet, as on a slow machine, may need an ACK each.
void expect_acks(const Counts& counts) {
  EXPECT_LE(counts.of(autograd_wire::kAck), counts.of(autograd_wire::kGradients));
}

// The fewest ACKs alone that a pass on what `make_loss` makes takes; tries until there are none.
std::size_t fewest_acks(at::Tensor (*make_loss)(at::Tensor)) {
  std::size_t fewest = 1000;
  for (int tries = 0; tries < 20 && fewest != 0; ++tries) {
    Context context;
    const Counts counts = sent_by(context, make_loss(ones().requires_grad_()));
    fewest = std::min(fewest, counts.of(autograd_wire::kAck));
  }
  return fewest;
}

TEST(MessageCountFaults, AChainTakesOneMessageForEachHopAndTwoForItsEnd) {
  Cluster cluster(2);
  Context context;
  const Counts counts = sent_by(context, chain(ones().requires_grad_()));
  EXPECT_EQ(counts.of(autograd_wire::kGradients), 2 * kLength);
  EXPECT_EQ(counts.of(autograd_wire::kMark), 0u);
  EXPECT_EQ(counts.of(autograd_wire::kQuiet), 1u);
  EXPECT_EQ(counts.of(autograd_wire::kCloseMarking), 0u);
  EXPECT_EQ(counts.of(autograd_wire::kDone), 1u);
  expect_acks(counts);
  EXPECT_EQ(fewest_acks(chain), 0u) << "all ride";
}

TEST(MessageCountFaults, NestedCallsTakeOneMessageForEachHopAndTwoForEachWorker) {
  Cluster cluster(kLength + 1);
  Context context;
  const Counts counts = sent_by(context, nested(ones().requires_grad_()));
  EXPECT_EQ(counts.of(autograd_wire::kGradients), 2 * kLength);
  EXPECT_EQ(counts.of(autograd_wire::kMark), 0u);
  EXPECT_EQ(counts.of(autograd_wire::kQuiet), kLength);
  EXPECT_EQ(counts.of(autograd_wire::kCloseMarking), 0u);
  EXPECT_EQ(counts.of(autograd_wire::kDone), kLength);
  expect_acks(counts);
  EXPECT_EQ(fewest_acks(nested), 0u) << "all ride";
}

TEST(MessageCountFaults, AFanTakesFewMessagesWhateverItsWidth) {
  Cluster cluster(2);
  Context context;
  const auto x = ones().requires_grad_();
  std::vector<at::Tensor> results;
  for (int i = 0; i < 64; ++i) results.push_back(rpc_sync<times_parameter>("worker1", x));
  const Counts counts = sent_by(context, at::stack(results).sum());
  EXPECT_LE(counts.of(autograd_wire::kGradients), 64u);
  EXPECT_GE(counts.of(autograd_wire::kGradients), 2u);
  EXPECT_EQ(counts.of(autograd_wire::kMark), 0u);
  EXPECT_EQ(counts.of(autograd_wire::kQuiet), 1u);
  EXPECT_EQ(counts.of(autograd_wire::kCloseMarking), 0u);
  EXPECT_EQ(counts.of(autograd_wire::kDone), 1u);
  expect_acks(counts);
}

// The root waits for the result that is not used with the gradient of `first`; what lies behind is
// marked, and worker2 takes part only from then on.
TEST(MessageCountFaults, AnUnusedResultTakesMarksForWhatWaitsBehindIt) {
  Cluster cluster(3);
  Context context;
  const auto x = ones().requires_grad_();
  const auto y = rpc_sync<times_parameter>("worker1", x);
  const auto first = rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, y);
  rpc_sync<times_parameter>("worker2", first);  // unused
  const auto loss = rpc_sync<times_parameter>("worker1", first).sum();
  const Counts counts = sent_by(context, loss);
  EXPECT_EQ(counts.of(autograd_wire::kGradients), 8u);
  EXPECT_EQ(counts.of(autograd_wire::kMark), 6u);
  EXPECT_EQ(counts.of(autograd_wire::kQuiet), 1u);
  EXPECT_EQ(counts.of(autograd_wire::kCloseMarking), 2u);
  EXPECT_EQ(counts.of(autograd_wire::kDone), 2u);
  EXPECT_GE(counts.of(autograd_wire::kAck), 7u);  // each MARK, and QUIET
  EXPECT_LE(counts.of(autograd_wire::kAck), 9u);
}

TEST(MessageCountFaults, ControlFramesHaveTheSizesOfTheirFields) {
  constexpr std::size_t kHeader = 4 + 8 + 8 + 4 + 8 + 8 + 1;
  Cluster cluster(2);
  const auto x = ones().requires_grad_();
  Context context;
  const auto loss = chain(x);
  const Counts exact = sent_by(context, loss, {.retain_graph = true});
  EXPECT_EQ(exact.size_of(autograd_wire::kQuiet), kHeader + 8);
  EXPECT_EQ(exact.size_of(autograd_wire::kDone), kHeader);
  rpc_sync<times_parameter>("worker1", x);
  const Counts marking = sent_by(context, loss);
  EXPECT_EQ(marking.size_of(autograd_wire::kCloseMarking), kHeader + 8);
}

// What `pass` counts when all acknowledgements ride, as they do but on a slow machine.
template <class Pass>
Counts when_all_ride(const Pass& pass) {
  Counts counts = pass();
  for (int tries = 0; tries < 20 && counts.of(autograd_wire::kAck) != 0; ++tries) counts = pass();
  return counts;
}

at::Tensor rows_of(at::Tensor table, at::Tensor rows) {
  return at::embedding(table, rows, -1, false, /*sparse=*/true);
}

TEST(MessageCountFaults, ASparseGradientTakesItsRowsWhateverTheTable) {
  constexpr std::size_t kColumns = 16, kRow = kColumns * sizeof(double) + sizeof(std::int64_t);
  Cluster cluster(2);
  const auto bytes_for = [](std::int64_t rows_of_table, std::int64_t rows) {
    const Counts counts = when_all_ride([&] {
      Context context;
      const auto table = at::ones({rows_of_table, kColumns}, at::kDouble).requires_grad_();
      const auto result = rpc_sync<rows_of>("worker1", table, at::arange(rows));
      Counts sent = sent_by(context, result.sum());
      EXPECT_TRUE(context.gradient(table).is_sparse());
      return sent;
    });
    EXPECT_EQ(counts.of(autograd_wire::kGradients), 2u);
    return counts.data;
  };
  const std::size_t small = bytes_for(100, 1);
  EXPECT_EQ(bytes_for(10'000, 1), small);
  // A row more: in the gradient of the result, and in that of the table with its number.
  EXPECT_LE(bytes_for(100, 9), small + 8 * (kRow + kColumns * sizeof(double)) + 64);
  EXPECT_LE(small, 1018u);
}

}  // namespace
}  // namespace stitch::testing::message_counts_test
