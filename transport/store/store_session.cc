#include "stitch/transport/store/store_session.h"

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/transport/store/tcp_store_protocol.h"

namespace stitch::transport {

namespace {

constexpr std::chrono::seconds kHandshakeTimeout{10};
constexpr std::size_t kMaxUnsentBytes = std::size_t{32} << 20;

}  // namespace

void StoreSession::start() {
  stream_->set_max_unsent_bytes(kMaxUnsentBytes);
  timer_ = loop_.call_at(base::deadline_after(kHandshakeTimeout), [weak = weak_from_this()] {
    if (const auto self = weak.lock(); self && self->state_ != State::open) self->close(Error());
  });
  stream_->start(shared_from_this(), StoreHandshake::kHelloBytes);
}

void StoreSession::on_frame(FramedStream& stream, std::span<const std::byte> frame) {
  switch (state_) {
    case State::hello:
      take_hello(frame);
      break;
    case State::proof:
      handshake_->take_proof(frame);
      stream.send(encode_answer(handshake_->proof().span()));
      stream.seal(handshake_->make_sealer(), handshake_->make_opener());
      open();
      break;
    case State::open:
      owner_->on_request(shared_from_this(), frame);
      break;
  }
}

// Sends the reason before the connection is closed.
void StoreSession::on_error(FramedStream& stream, const Error& error) {
  if (state_ != State::open) {
    stream.send_last(encode_refusal(error.code(), error.what()));
  } else if (stream.unsent_bytes() == 0) {
    base::Bytes farewell;
    base::ByteWriter writer(farewell);
    writer.write(kFarewell);
    writer.write_bytes(encode_refused(error.code(), error.what()).span());
    stream.send_last(std::move(farewell));
  }
}

void StoreSession::on_closed(FramedStream&, const Error&) {
  loop_.cancel(timer_);
  owner_->on_closed(*this);
}

void StoreSession::reply(std::uint64_t request, const base::Bytes& status_and_result) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(request);
  writer.write_bytes(status_and_result.span());
  stream_->send(std::move(bytes));
}

void StoreSession::take_hello(std::span<const std::byte> frame) {
  handshake_.emplace(StoreHandshake::Role::server, options_.job, options_.key);
  handshake_->take_hello(frame);
  owner_->check_room();
  stream_->send(encode_answer(handshake_->hello().span()));
  if (handshake_->authenticated()) {
    state_ = State::proof;
    stream_->expect_frames_of(StoreHandshake::kProofBytes);
  } else {
    open();
  }
}

void StoreSession::open() {
  state_ = State::open;
  handshake_.reset();
  stream_->expect_frames_up_to(kMaxRequestBytes);
  stream_->set_budget(frame_budget_);
  loop_.cancel(timer_);
  owner_->on_open(*this);
}

}  // namespace stitch::transport
