#include "stitch/rref/agent/carried_sections.h"

#include <string>

#include "stitch/base/byte_io.h"

namespace stitch::rref {
namespace {

enum CarriedFlags : std::uint8_t { kPinned = 1, kLost = 2, kCreated = 4 };

using Section = std::span<const std::byte>;

std::vector<CarriedRef> read_refs(Section section) {
  std::vector<CarriedRef> refs;
  base::ByteReader in(section, "list of references");
  const auto count = in.read_count(kWireIdBytes + 9);
  for (std::uint32_t i = 0; i < count; ++i) {
    CarriedRef each;
    each.id = read_rref_id(in);
    each.token = in.read<std::uint64_t>();
    const auto flags = in.read<std::uint8_t>();
    each.pinned = (flags & kPinned) != 0;
    each.lost = (flags & kLost) != 0;
    each.created = (flags & kCreated) != 0;
    refs.push_back(each);
  }
  in.expect_end();
  return refs;
}

CreateRequest read_create(Section section) {
  base::ByteReader in(section, "request to create");
  CreateRequest read;
  read.id = read_rref_id(in);
  read.timeout = std::chrono::nanoseconds(in.read<std::int64_t>());
  in.expect_end();
  return read;
}

TargetRequest read_target(Section section, std::size_t refs) {
  base::ByteReader in(section, "request about an object");
  TargetRequest read;
  read.index = in.read<std::uint32_t>();
  read.use = in.read<TargetUse>();
  in.expect_end();
  if (read.index >= refs)
    throw Error(ErrorCode::protocol, "request about an object names reference " +
                                         std::to_string(read.index) + " of " +
                                         std::to_string(refs));
  if (read.use < TargetUse::call || read.use > TargetUse::await)
    throw Error(ErrorCode::protocol, "request about an object has an unknown use");
  return read;
}

std::vector<ReferredArgument> read_arguments(Section section, const CarriedSections& carried) {
  std::vector<ReferredArgument> arguments;
  base::ByteReader in(section, "list of referred arguments");
  const auto count = in.read_count(16);
  for (std::uint32_t i = 0; i < count; ++i) {
    ReferredArgument each;
    each.position = in.read<std::uint32_t>();
    each.index = in.read<std::uint32_t>();
    each.type = in.read<std::uint64_t>();
    // The writer goes through the arguments in order.
    if (each.position >= kMaxReferredArguments ||
        (!arguments.empty() && arguments.back().position >= each.position)) {
      throw Error(ErrorCode::protocol,
                  "list of referred arguments names position " + std::to_string(each.position) +
                      " out of order or above " + std::to_string(kMaxReferredArguments - 1));
    }
    if (each.index >= carried.refs.size())
      throw Error(ErrorCode::protocol, "an argument names reference " + std::to_string(each.index) +
                                           " of " + std::to_string(carried.refs.size()));
    // It would wait for itself.
    if (carried.create && carried.refs[each.index].id == carried.create->id)
      throw Error(ErrorCode::protocol,
                  to_string(carried.create->id) + " is an argument of its own creation");
    arguments.push_back(each);
  }
  in.expect_end();
  return arguments;
}

}  // namespace

CarriedSections CarriedSections::read(const CarriedBytes& bytes) {
  CarriedSections carried;
  if (bytes.refs) carried.refs = read_refs(*bytes.refs);
  if (bytes.create) carried.create = read_create(*bytes.create);
  if (bytes.target) carried.target = read_target(*bytes.target, carried.refs.size());
  if (bytes.arguments) carried.arguments = read_arguments(*bytes.arguments, carried);
  return carried;
}

base::Bytes encode(std::span<const CarriedRef> refs) {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  out.write(static_cast<std::uint32_t>(refs.size()));
  for (const CarriedRef& each : refs) {
    write(out, each.id);
    out.write(each.token);
    out.write(static_cast<std::uint8_t>((each.pinned ? kPinned : 0) | (each.lost ? kLost : 0) |
                                        (each.created ? kCreated : 0)));
  }
  return bytes;
}

base::Bytes encode(const CreateRequest& create) {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  write(out, create.id);
  out.write(static_cast<std::int64_t>(create.timeout.count()));
  return bytes;
}

base::Bytes encode(const TargetRequest& target) {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  out.write(target.index);
  out.write(target.use);
  return bytes;
}

base::Bytes encode(std::span<const ReferredArgument> arguments) {
  base::Bytes bytes;
  base::ByteWriter out(bytes);
  out.write(static_cast<std::uint32_t>(arguments.size()));
  for (const ReferredArgument& each : arguments) {
    out.write(each.position);
    out.write(each.index);
    out.write(each.type);
  }
  return bytes;
}

}  // namespace stitch::rref
