#include "stitch/rpc/membership/member_card.h"

#include <algorithm>

#include "stitch/base/error.h"
#include "stitch/base/published_table.h"

namespace stitch::rpc {

namespace {

constexpr std::size_t kMaxAddress = 256;

// They are parts of error texts and of names of numbers.
bool is_address(const std::string& text) {
  return text.size() <= kMaxAddress &&
         std::ranges::all_of(text, [](char c) { return c > ' ' && c < 0x7f; });
}

}  // namespace

void MemberCard::write(base::ByteWriter& out) const {
  out.write_string(info.name);
  out.write(info.id.value());
  out.write(info.epoch);
  out.write(static_cast<std::uint32_t>(addresses.size()));
  for (const auto& address : addresses) out.write_string(address);
  out.write_string(record);
}

MemberCard MemberCard::read(base::ByteReader& in) {
  constexpr std::size_t kLengthBytes = 4;  // of a string
  constexpr std::uint32_t kMaxAddresses = 256;
  constexpr std::uint32_t kMaxWorkers = base::PublishedTable<MemberCard>::kMaxSize;
  MemberCard card;
  card.info.name = in.read_string();
  if (!is_worker_name(card.info.name))
    throw Error(ErrorCode::protocol, "card of a member has what is no worker's name");
  card.info.id = WorkerId(in.read<std::uint32_t>());
  if (card.info.id.value() >= kMaxWorkers)
    throw Error(ErrorCode::protocol, "card of a member has the id " +
                                         std::to_string(card.info.id.value()) + "; ids are below " +
                                         std::to_string(kMaxWorkers));
  card.info.epoch = in.read<std::uint64_t>();
  const auto count = in.read_count(kLengthBytes);
  if (count > kMaxAddresses)
    throw Error(ErrorCode::protocol, "card of a member has " + std::to_string(count) +
                                         " addresses; at most " + std::to_string(kMaxAddresses));
  for (std::uint32_t i = 0; i < count; ++i) {
    card.addresses.push_back(in.read_string());
    if (!is_address(card.addresses.back()))
      throw Error(ErrorCode::protocol,
                  "card of " + to_string(card.info) + " has what is no address; one is at most " +
                      std::to_string(kMaxAddress) + " printable characters of ASCII");
  }
  card.record = in.read_string();
  if (card.record.size() > kMaxRecordBytes)
    throw Error(ErrorCode::protocol, "card of " + to_string(card.info) + " has a record of " +
                                         std::to_string(card.record.size()) +
                                         " bytes; the limit is " + std::to_string(kMaxRecordBytes));
  return card;
}

}  // namespace stitch::rpc
