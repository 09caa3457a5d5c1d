// The control frames of contexts and passes (dist_autograd/PROTOCOL.md): read in the order in which
// the engine reads them.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <tuple>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rpc/message/archive.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/message/tensor_codec.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz::passes {

namespace wire = dist_autograd::wire;

template <class... Parts>
static base::Bytes written(const Parts&... parts) {
  rpc::OutMessage message(rpc::wire::kRequest);
  rpc::OutArchive archive(message);
  archive(parts...);
  return body_of(message);
}

// What was read is written with the same bytes.
template <class... Parts>
static void read(rpc::InMessage& message) {
  std::tuple<Parts...> parts;
  rpc::InArchive archive(message, message.view.body());
  std::apply([&](auto&... each) { archive(each...); }, parts);
  archive.expect_end();
  const base::Bytes again = std::apply([](const auto&... each) { return written(each...); }, parts);
  require(same(again.span(), message.view.body()), "a control frame, written again");
}

static void check_positions(const wire::GradientEntry& entry) {
  const auto check = [](const dist_autograd::Positions& positions, std::uint32_t count) {
    if (!positions.below(count)) return;
    // None beyond what `below` says, and each of them once when they are put together again.
    dist_autograd::Positions again;
    for (std::uint32_t at = 0; at < std::min(count, std::uint32_t{1} << 20); ++at) {
      if (positions.has(at)) again.add(at);
    }
    require(!positions.has(count), "a position is not below its count");
    require(count > (std::uint32_t{1} << 20) || again == positions,
            "positions, put together again");
  };
  check(entry.undefined, 2 * entry.count);
  check(entry.differentiable, entry.count);
}

// GRADIENTS: how long its table of tensors is, the table, the body. The tensors come with it.
static void read_gradients(rpc::InMessage& message) {
  rpc::decode_tensors(message);
  wire::PassHeader header;
  wire::Ack ack;
  std::vector<wire::GradientEntry> entries;
  std::vector<at::Tensor> tensors;
  rpc::InArchive archive(message, message.view.body());
  archive(header);
  archive(ack, entries, tensors);
  archive.expect_end();
  require(tensors.size() <= message.tensors.size(), "gradients that did not arrive");
  for (const auto& entry : entries) check_positions(entry);
  require(same(written(header, ack, entries, tensors).span(), message.view.body()),
          "gradients, written again");
}

// The input: the kind of the frame, how long the table of its tensors is, the table, the body.
static bool run(Bytes input) {
  Choices choices(input);
  const auto kind = static_cast<std::uint16_t>(
      wire::kFirstKind + choices.byte() % (wire::kLastKind + 1 - wire::kFirstKind));
  const Bytes table = choices.take(choices.word());
  return accepts({ErrorCode::protocol, ErrorCode::invalid_argument}, [&] {
    rpc::InMessage message = message_with(kind, choices.rest(), table);
    switch (kind) {
      case wire::kMark:
        read<wire::PassHeader, wire::Mark>(message);
        break;
      case wire::kAck:
        read<wire::PassHeader, wire::Ack>(message);
        break;
      case wire::kGradients:
        read_gradients(message);
        break;
      case wire::kDone:
        read<wire::PassHeader>(message);
        break;
      case wire::kAbort: {
        // The codes of errors that are not known become `internal`.
        wire::PassHeader header;
        Error error(ErrorCode::internal, "");
        rpc::InArchive archive(message, message.view.body());
        archive(header);
        archive(error);
        archive.expect_end();
        touch(std::as_bytes(std::span(std::string_view(error.what()))));
        break;
      }
      case wire::kRelease:
        read<wire::Release>(message);
        break;
      default:  // CLOSE_MARKING, QUIET
        read<wire::PassHeader, wire::OlderPasses>(message);
        break;
    }
  });
}

static base::Bytes seed_of(std::uint16_t kind, rpc::OutMessage& message) {
  const base::Bytes body = body_of(message);
  message.frame.end_body();
  rpc::encode_tensors(message);
  const transport::Message whole = std::move(message.frame).finish();
  const transport::FrameView view(whole);
  const auto* table = view.section(rpc::wire::kTensors);
  base::Bytes seed;
  base::ByteWriter out(seed);
  out.write(static_cast<std::uint8_t>(kind - wire::kFirstKind));
  out.write(static_cast<std::uint16_t>(table == nullptr ? 0 : table->bytes.size()));
  if (table != nullptr) out.write_bytes(table->bytes);
  out.write_bytes(body.span());
  return seed;
}

template <class... Parts>
static base::Bytes frame_of(std::uint16_t kind, const Parts&... parts) {
  rpc::OutMessage message(kind);
  rpc::OutArchive archive(message);
  archive(parts...);
  return seed_of(kind, message);
}

static Seeds seeds() {
  Seeds list;
  const wire::PassHeader header{
      {WorkerId(0), 1, 5}, {WorkerId(1), 1, 2}, wire::PassHeader::kAnomaly};
  list.push_back({"mark", frame_of(wire::kMark, header, wire::Mark{{3, 4, 9}})});
  list.push_back({"ack", frame_of(wire::kAck, header, wire::Ack{2, {}, 0})});
  list.push_back({"ack-last", frame_of(wire::kAck, header, wire::Ack{1, {WorkerId(2)}, 7})});
  list.push_back({"close-marking", frame_of(wire::kCloseMarking, header, wire::OlderPasses{})});
  list.push_back({"quiet", frame_of(wire::kQuiet, header, wire::OlderPasses{{1}})});
  list.push_back({"done", frame_of(wire::kDone, header)});
  list.push_back({"abort", frame_of(wire::kAbort, header, Error(ErrorCode::timeout, "late"))});
  list.push_back({"release", frame_of(wire::kRelease, wire::Release{header.context, 4, 1})});
  // Undefined gradients are bits.
  wire::GradientEntry undefined;
  undefined.link = 3;
  undefined.count = 12;
  for (const std::uint32_t tensor : {0, 1, 9, 11}) undefined.add_undefined(tensor, tensor < 9);
  list.push_back({"gradients-undefined", frame_of(wire::kGradients, header, wire::Ack{},
                                                  std::vector<wire::GradientEntry>{undefined},
                                                  std::vector<at::Tensor>{})});
  wire::GradientEntry entry;
  entry.link = 4;
  entry.gradient_link = 8;
  entry.count = 2;
  entry.differentiable = {1};
  const std::vector<at::Tensor> tensors{at::ones({2, 3}), at::empty({2, 0}, at::kDouble)};
  list.push_back({"gradients", frame_of(wire::kGradients, header, wire::Ack{1, {WorkerId(0)}, 2},
                                        std::vector<wire::GradientEntry>{entry}, tensors)});
  wire::GradientEntry of_sparse;
  of_sparse.link = 5;
  of_sparse.count = 1;
  const std::vector<at::Tensor> none{
      at::sparse_coo_tensor(at::zeros({2, 3}, at::kLong), at::ones({3}), {4, 4})};
  list.push_back({"gradients-sparse", frame_of(wire::kGradients, header, wire::Ack{},
                                               std::vector<wire::GradientEntry>{of_sparse}, none)});
  return list;
}

}  // namespace stitch::fuzz::passes

namespace stitch::fuzz {
// An empty tensor takes some hundred bytes, and a sparse one is three.
const Target autograd{"autograd", passes::run, passes::seeds, 512, std::size_t{4} << 20};
}  // namespace stitch::fuzz
