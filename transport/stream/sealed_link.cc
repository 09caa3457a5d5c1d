#include "stitch/transport/stream/sealed_link.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace stitch::transport {

namespace {

constexpr std::size_t kRecordBytes = kMaxPlainBytes + SealedRecord::kOverhead;
// Bytes of each buffer between this link and the one below. The part of it that traffic does not
// need is never touched, so the kernel gives it no memory.
constexpr std::size_t kBufferBytes = 4 * kRecordBytes;
// Bytes. A part of at least this size is sealed in place; smaller ones are copied into one record.
constexpr std::size_t kDirectBytes = std::size_t{16} << 10;

// A position in a sequence of memory pieces.
class Cursor {
 public:
  explicit Cursor(std::span<const iovec> parts) : parts_(parts) { skip_empty(); }
  [[nodiscard]] bool at_end() const noexcept { return index_ == parts_.size(); }
  [[nodiscard]] std::byte* data() const noexcept {
    return static_cast<std::byte*>(parts_[index_].iov_base) + offset_;
  }
  // Bytes left of the current piece.
  [[nodiscard]] std::size_t left() const noexcept { return parts_[index_].iov_len - offset_; }
  // REQUIRES: bytes <= left().
  void advance(std::size_t bytes) noexcept {
    offset_ += bytes;
    skip_empty();
  }
  void skip(std::size_t bytes) noexcept {
    while (bytes > 0) {
      const std::size_t step = std::min(bytes, left());
      advance(step);
      bytes -= step;
    }
  }

 private:
  void skip_empty() noexcept {
    while (index_ < parts_.size() && offset_ == parts_[index_].iov_len) {
      ++index_;
      offset_ = 0;
    }
  }
  const std::span<const iovec> parts_;
  std::size_t index_ = 0;
  std::size_t offset_ = 0;
};

// A buffer that is not zero-filled; bytes [begin, end) are in use.
struct Staged {
  std::unique_ptr<std::byte[]> memory = std::make_unique_for_overwrite<std::byte[]>(kBufferBytes);
  std::size_t begin = 0;
  std::size_t end = 0;
  [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
  [[nodiscard]] std::byte* front() const noexcept { return memory.get() + begin; }
  [[nodiscard]] std::byte* back() const noexcept { return memory.get() + end; }
  [[nodiscard]] std::size_t room() const noexcept { return kBufferBytes - end; }
};

class SealedLink final : public Link {
 public:
  SealedLink(std::unique_ptr<Link>&& link, const SessionKeys& keys, Role role,
             std::span<const std::byte> early, std::size_t plain_output)
      : plain_output_(plain_output),
        sealer_(keys.cipher, role == Role::connecting ? keys.from_connecting : keys.from_accepting),
        opener_(keys.cipher,
                role == Role::connecting ? keys.from_accepting : keys.from_connecting) {
    if (early.size() > kBufferBytes) {
      throw Error(ErrorCode::protocol,
                  std::to_string(early.size()) + " bytes came with the end of the handshake");
    }
    std::copy(early.begin(), early.end(), in_.back());
    in_.end += early.size();
    link_ = std::move(link);
  }

  int descriptor() const noexcept override { return link_->descriptor(); }
  bool cheap() const noexcept override { return link_->cheap(); }
  std::size_t bulk_room(bool few) override { return link_->bulk_room(few); }
  bool await_room() override { return link_->await_room(); }
  void on_descriptor() override { link_->on_descriptor(); }
  bool sleep() override { return link_->sleep(); }
  void wake() override { link_->wake(); }
  void close() noexcept override { link_->close(); }

  std::size_t write(std::span<const iovec> parts) override {
    std::size_t taken = 0;
    if (plain_output_ > 0) {
      taken = write_plain(parts);
      if (plain_output_ > 0) return taken;
    }
    Cursor from(parts);
    from.skip(taken);
    while (flush_output() && !from.at_end()) {
      while (!from.at_end() && out_.room() >= kRecordBytes) taken += seal_next(from);
    }
    return taken;
  }
  bool holds_output() const noexcept override { return out_.size() > 0; }
  bool flush_output() override {
    while (out_.size() > 0) {
      const iovec all{out_.front(), out_.size()};
      const std::size_t written = link_->write({&all, 1});
      if (written == 0) return false;
      out_.begin += written;
    }
    out_.begin = out_.end = 0;
    return true;
  }

  std::size_t read(std::span<const iovec> parts) override {
    while (!holds_input()) {
      if (!fill()) return 0;
    }
    std::size_t given = 0;
    for (Cursor to(parts); !to.at_end() && holds_input();) given += give(to);
    return given;
  }
  bool holds_input() override { return opened_ > 0 || record_is_there(); }

  std::optional<Error> ended() override {
    auto error = link_->ended();
    if (error && in_.size() > 0) {
      return Error(ErrorCode::disconnected, "the stream ended within sealed record " +
                                                std::to_string(opener_.records()) + ": " +
                                                error->what());
    }
    return error;
  }

 private:
  // The rest of the handshake. What does not fit in one write waits for the next one.
  std::size_t write_plain(std::span<const iovec> parts) {
    std::size_t written = 0;
    for (Cursor from(parts); !from.at_end() && plain_output_ > 0;) {
      const iovec part{from.data(), std::min(from.left(), plain_output_)};
      const std::size_t step = link_->write({&part, 1});
      written += step;
      plain_output_ -= step;
      if (step < part.iov_len) break;
      from.advance(step);
    }
    return written;
  }

  // Seals the next bytes as one record at the end of out_, which has room for it.
  std::size_t seal_next(Cursor& from) {
    std::byte* const record = out_.back();
    std::size_t bytes = 0;
    if (from.left() >= kDirectBytes) {
      bytes = std::min(from.left(), kMaxPlainBytes);
      sealer_.seal(from.data(), bytes, record);
      from.advance(bytes);
    } else {
      std::byte* const body = record + SealedRecord::kHeaderBytes;
      while (!from.at_end() && from.left() < kDirectBytes &&
             bytes + from.left() <= kMaxPlainBytes) {
        const std::size_t step = from.left();
        std::memcpy(body + bytes, from.data(), step);
        bytes += step;
        from.advance(step);
      }
      sealer_.seal(body, bytes, record);
    }
    out_.end += bytes + SealedRecord::kOverhead;
    return bytes;
  }

  // Whether the next record has arrived completely.
  bool record_is_there() {
    if (next_bytes_ == 0) {
      if (in_.size() < SealedRecord::kHeaderBytes) return false;
      next_bytes_ = opener_.open_header(in_.front());
      if (next_bytes_ == 0 || next_bytes_ > kMaxPlainBytes) {
        throw Error(ErrorCode::protocol, "sealed record of " + std::to_string(next_bytes_) +
                                             " bytes, 1 to " + std::to_string(kMaxPlainBytes) +
                                             " are allowed");
      }
    }
    return in_.size() >= next_bytes_ + SealedRecord::kOverhead;
  }

  // REQUIRES: holds_input().
  std::size_t give(Cursor& to) {
    if (opened_ == 0) {
      const std::size_t bytes = std::exchange(next_bytes_, 0);
      std::byte* const body = in_.front() + SealedRecord::kHeaderBytes;
      if (to.left() >= bytes) {
        opener_.open(body, bytes, to.data());
        in_.begin += bytes + SealedRecord::kOverhead;
        to.advance(bytes);
        return bytes;
      }
      opener_.open(body, bytes, body);
      in_.begin += SealedRecord::kHeaderBytes;
      opened_ = bytes;
    }
    const std::size_t step = std::min(opened_, to.left());
    std::memcpy(to.data(), in_.front(), step);
    to.advance(step);
    in_.begin += step;
    opened_ -= step;
    if (opened_ == 0) in_.begin += SealedRecord::kTagBytes;
    return step;
  }

  // Reads more of the next record. REQUIRES: !holds_input().
  bool fill() {
    if (in_.size() == 0) {
      in_.begin = in_.end = 0;
    } else if (kBufferBytes - in_.begin < kRecordBytes) {
      std::memmove(in_.memory.get(), in_.front(), in_.size());
      in_.end = in_.size();
      in_.begin = 0;
    }
    const iovec rest{in_.back(), in_.room()};
    const std::size_t got = link_->read({&rest, 1});
    in_.end += got;
    return got > 0;
  }

  std::unique_ptr<Link> link_;  // constant

  // The thread that writes.
  std::size_t plain_output_;
  Sealer sealer_;
  Staged out_;  // sealed, to be written

  // The thread that polls.
  Opener opener_;
  Staged in_;                   // sealed, but for the first opened_ bytes
  std::size_t opened_ = 0;      // of the first record, not yet given
  std::size_t next_bytes_ = 0;  // of the next record; 0: not known yet
};

}  // namespace

std::unique_ptr<Link> make_sealed_link(std::unique_ptr<Link>&& link, const SessionKeys& keys,
                                       Role role, std::span<const std::byte> early,
                                       std::size_t plain_output) {
  return std::make_unique<SealedLink>(std::move(link), keys, role, early, plain_output);
}

}  // namespace stitch::transport
