#include "stitch/rpc/membership/member_card.h"

#include <algorithm>

#include "stitch/base/error.h"
#include "stitch/base/published_table.h"

namespace stitch::rpc {

namespace {

constexpr std::size_t kMaxAddress = 256;

// They are parts of error texts and of names of numbers.
bool is_address(const std::string& text) {
  return !text.empty() && text.size() <= kMaxAddress &&
         std::ranges::all_of(text, [](char c) { return c > ' ' && c < 0x7f; });
}

}  // namespace

void write_info(base::ByteWriter& out, const WorkerInfo& info) {
  out.write_string(info.name);
  out.write(info.id.value());
  out.write(info.epoch);
}

WorkerInfo read_info(base::ByteReader& in) {
  constexpr std::uint32_t kMaxWorkers = base::PublishedTable<MemberCard>::kMaxSize;
  constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;  // stores count up to 2^63 - 1
  WorkerInfo info{in.read_string(), WorkerId(in.read<std::uint32_t>()), in.read<std::uint64_t>()};
  if (!is_worker_name(info.name))
    throw Error(ErrorCode::protocol, "a worker is called by what is no worker's name");
  if (info.id.value() >= kMaxWorkers)
    throw Error(ErrorCode::protocol,
                to_string(info) + " cannot be: ids are below " + std::to_string(kMaxWorkers));
  if (info.epoch > kMaxEpoch)
    throw Error(ErrorCode::protocol, to_string(info) + " is in an epoch that none can follow");
  return info;
}

void MemberCard::write(base::ByteWriter& out) const {
  write_info(out, info);
  out.write(static_cast<std::uint32_t>(addresses.size()));
  for (const auto& address : addresses) out.write_string(address);
  out.write_string(record);
}

MemberCard MemberCard::read(base::ByteReader& in) {
  constexpr std::size_t kLengthBytes = 4;  // of a string
  constexpr std::uint32_t kMaxAddresses = 256;
  MemberCard card{read_info(in), {}, {}};
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
