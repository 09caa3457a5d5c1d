#include "stitch/dist_autograd/recording.h"

#include <algorithm>
#include <array>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/recycler.h"
#include "stitch/dist_autograd/current_context.h"
#include "stitch/dist_autograd/graph/recv_node.h"
#include "stitch/dist_autograd/graph/unrecorded_node.h"
#include "stitch/dist_autograd/protocol/carried_autocast.h"
#include "stitch/rpc/calls/incoming_call.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::dist_autograd {

namespace {

// Removes the SendNode of a message that certainly never left: sending it failed, or it was
// destroyed before an attempt to send it.
class UnsentLink final : public rpc::Attachment {
 public:
  [[nodiscard]] static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }
  ~UnsentLink() override {
    if (context_) context_->remove_send(link_);
  }
  void watch(std::shared_ptr<ContextState> context, LinkId link) {
    context_ = std::move(context);
    link_ = link;
  }
  void on_sent(const std::optional<Error>& error) override {
    if (error && context_) context_->remove_send(link_);
    context_.reset();
  }

 private:
  std::shared_ptr<ContextState> context_;
  LinkId link_;
};

// The wire id of the function that a request names.
std::uint64_t function_of(std::span<const std::byte> body) {
  base::ByteReader in(body, "request");
  static_cast<void>(in.read<std::uint64_t>());
  return in.read<std::uint64_t>();
}

struct Section {
  ContextId context;
  std::uint64_t link = 0;  // 0: no tensor requires grad
  std::vector<std::uint32_t> tensors;

  void write(base::Bytes& bytes) const {
    base::ByteWriter out(bytes);
    out.write(context.home.value());
    out.write(context.epoch);
    out.write(context.counter);
    out.write(link);
    out.write(static_cast<std::uint32_t>(tensors.size()));
    for (const std::uint32_t index : tensors) out.write(index);
  }
  static Section read(std::span<const std::byte> bytes) {
    base::ByteReader in(bytes, "context section");
    Section section;
    section.context.home = WorkerId(in.read<std::uint32_t>());
    section.context.epoch = in.read<std::uint64_t>();
    section.context.counter = in.read<std::uint64_t>();
    section.link = in.read<std::uint64_t>();
    section.tensors.resize(in.read_count(sizeof(std::uint32_t)));
    for (std::uint32_t& index : section.tensors) index = in.read<std::uint32_t>();
    in.expect_end();
    // One tensor cannot be two inputs of a node.
    if (std::adjacent_find(section.tensors.begin(), section.tensors.end(),
                           std::greater_equal<>()) != section.tensors.end())
      throw Error(ErrorCode::protocol, "context section names its tensors in no order");
    return section;
  }
};

// Where the tensors of these indexes were at the sender; nothing when all were on the CPU, as here.
std::vector<c10::Device> origins_of(const rpc::InMessage& message,
                                    const std::vector<std::uint32_t>& indexes) {
  if (!message.arrival) return {};
  std::vector<c10::Device> origins(indexes.size(), c10::Device(c10::kCPU));
  for (std::size_t i = 0; i < indexes.size(); ++i) {
    for (const auto& arrived : message.arrival->tensors) {
      if (arrived.tensor == indexes[i]) origins[i] = arrived.there;
    }
  }
  return origins;
}

// Has a call made with grad mode off run with grad mode off; its result requires no grad at the
// caller.
void add_no_grad(rpc::OutMessage& message, bool request) {
  const bool matters = request || std::any_of(message.tensors.begin(), message.tensors.end(),
                                              [](const at::Tensor& tensor) {
                                                return tensor.defined() && tensor.requires_grad();
                                              });
  if (!matters) return;
  constexpr std::array<std::byte, 1> kNothing{};
  message.frame.add_section(wire::kNoGradSection, kNothing);
}

// Names the tensors whose history stays behind, since the message belongs to no context.
void add_history(rpc::OutMessage& message) {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  for (std::uint32_t i = 0; i < message.tensors.size(); ++i) {
    const at::Tensor& tensor = message.tensors[i];
    if (tensor.defined() && tensor.requires_grad() && !tensor.is_leaf()) out.write(i);
  }
  if (!bytes.span().empty()) message.frame.add_section(wire::kHistorySection, bytes.span());
}

// Has a backward that reaches one of them fail.
void mark_history(rpc::InMessage& message, std::span<const std::byte> section) {
  base::ByteReader in(section, "history section");
  while (in.remaining() != 0) {
    const auto index = in.read<std::uint32_t>();
    if (index >= message.tensors.size() || !message.tensors[index].defined() ||
        !message.tensors[index].is_leaf() || !message.tensors[index].requires_grad()) {
      throw Error(ErrorCode::protocol, "history section of a message from " +
                                           stitch::to_string(message.from) + " names tensor " +
                                           std::to_string(index) + ", which has none");
    }
    UnrecordedNode::attach(message.tensors[index], message.from.name);
  }
}

// Throws Error(invalid_argument) where the worker that is current, and whose context this is, is
// not `self`, which sends: a call through a member or a reference of another worker of the process.
void require_own_context(const rpc::Agent& self, const ContextId& context) {
  const auto& current = rpc::ExecutionContext::current().runtime;
  if (!current || current.get() == &self) return;
  throw Error(ErrorCode::invalid_argument,
              "dist_autograd context " + dist_autograd::to_string(context) + " belongs to " +
                  stitch::to_string(std::static_pointer_cast<rpc::Agent>(current)->self()) +
                  ", which is current, and the call is made by " + stitch::to_string(self.self()) +
                  " of the same process, whose reference or member was used: the gradients of its "
                  "tensors would be lost");
}

// The answer to such a call, none of whose arguments required grad.
Error not_of_this_worker(const rpc::Agent& self, const ContextId& context) {
  return Error(ErrorCode::invalid_argument,
               "its result has gradients of dist_autograd context " +
                   dist_autograd::to_string(context) + ", which " + stitch::to_string(self.self()) +
                   " that made the call takes no part in, and they would be lost: the context was "
                   "current, but a reference or member of another worker of the process was used; "
                   "use its own, or call with grad mode off");
}

}  // namespace

void Recording::on_send(rpc::OutMessage& message, const WorkerInfo& to) {
  const auto kind = message.frame.kind();
  const bool request = kind == stitch::rpc::wire::kRequest;
  if (!request && kind != stitch::rpc::wire::kReply) return;
  if (request && rpc::Autocast::is_on()) [[unlikely]]
    add_autocast(message);
  // A reply leaves on the thread that completes it, whose grad mode means nothing.
  const bool no_grad =
      request ? !at::GradMode::is_enabled() : rpc::ExecutionContext::current().no_grad;
  if (no_grad) add_no_grad(message, request);
  if (no_grad && !request) return;
  const auto current = CurrentContext::get();
  // A peer that is told the id will be told of the end; after the end no peer is told the id.
  if (!current || (request ? !current->context->add_peer(to) : current->context->ended())) {
    if (!no_grad) add_history(message);
    return;
  }
  const auto& context = current->context;

  Section section{context->id(), 0, {}};
  std::vector<at::Tensor> tensors;
  for (std::uint32_t i = 0; !no_grad && i < message.tensors.size(); ++i) {
    if (!message.tensors[i].defined() || !message.tensors[i].requires_grad()) continue;
    section.tensors.push_back(i);
    tensors.push_back(message.tensors[i]);
  }
  if (!tensors.empty()) {
    if (request) require_own_context(agent_, context->id());
    const LinkId link = next_link();
    const auto body = message.frame.body().span().subspan(transport::FrameBuilder::body_offset());
    LinkName call{.part = LinkName::Part::call,
                  .function = request ? function_of(body) : current->function,
                  .callee = request ? to.name : agent_.self().name};
    auto& unsent = message.attachment<UnsentLink>();  // first: without it the link would stay
    // Kept before the message leaves: backward can only start from what has arrived.
    if (!context->add_send(link, make_node<SendNode>(link, to, std::move(call), tensors))) return;
    section.link = link.counter;
    unsent.watch(context, link);
  } else if (!request) {
    return;  // the caller knows the context
  }
  base::Bytes bytes;
  section.write(bytes);
  message.frame.add_section(wire::kContextSection, bytes.span());
}

void Recording::on_decode(rpc::InMessage& message, rpc::ExecutionContext& execution) {
  const bool request = message.view.kind() == stitch::rpc::wire::kRequest;
  if (message.view.section(wire::kNoGradSection) != nullptr) {
    if (request) {
      execution.no_grad = true;
    } else {
      for (at::Tensor& tensor : message.tensors) {
        if (tensor.defined() && tensor.requires_grad()) tensor.set_requires_grad(false);
      }
    }
  }
  if (request) execution.autocast = autocast_of(message);
  const auto* const found = message.view.section(wire::kContextSection);
  if (found == nullptr) {
    if (const auto* const history = message.view.section(wire::kHistorySection))
      mark_history(message, history->bytes);
    return;
  }
  const Section section = Section::read(found->bytes);
  const auto context =
      request ? release_.join(section.context, message.from) : contexts_.find(section.context);
  if (!context) {
    // What has ended is not recorded any more, when a message is late.
    if (!request && section.link != 0 && !contexts_.has_ended(section.context))
      throw not_of_this_worker(agent_, section.context);
    return;
  }
  LinkName call;
  if (request) {
    call = {.part = LinkName::Part::argument, .function = function_of(message.view.body())};
    execution.autograd_context =
        std::make_shared<const CurrentContext>(CurrentContext{context, call.function});
  }
  if (section.link == 0) return;
  std::vector<at::Tensor> tensors;
  for (const std::uint32_t index : section.tensors) {
    if (index >= message.tensors.size() || !message.tensors[index].defined() ||
        !torch::autograd::isDifferentiableType(message.tensors[index].scalar_type())) {
      throw Error(ErrorCode::protocol,
                  "context section of a message from " + stitch::to_string(message.from) +
                      " names tensor " + std::to_string(index) + ", which cannot have a gradient");
    }
    tensors.push_back(message.tensors[index].set_requires_grad(false));
  }
  RecvNode::attach({message.from.id, section.link}, message.from, context->id(), std::move(call),
                   tensors, origins_of(message, section.tensors));
}

}  // namespace stitch::dist_autograd
