#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/reserve.h"
#include "stitch/rref/call_order.h"
#include "stitch/rref/frame_kinds.h"
#include "stitch/rref/lifetime/lifetime.h"

// What a message says about references, in its sections. The body holds indexes; the ids and tokens
// are in a section of the frame, so that a message that is refused or arrives too late is settled
// without decoding its body.
namespace stitch::rref {

struct CreateRequest {
  RRefId id;
  std::chrono::nanoseconds timeout{0};  // the owner fails the creation then; 0: never
};
struct TargetRequest {
  std::uint32_t index = 0;  // into the carried references
  TargetUse use = TargetUse::call;
};
// An argument of a request for which a reference stands: its object is wanted there.
struct ReferredArgument {
  std::uint32_t position = 0;  // from 0
  std::uint32_t index = 0;     // into the carried references
  std::uint64_t type = 0;      // detail::type_id() of the object
};

// Functions with more parameters do not take references for them.
inline constexpr std::uint32_t kMaxReferredArguments = 256;

// The bytes of the sections of one message that are about references: nothing where it has none.
// A view.
struct CarriedBytes {
  using Section = std::optional<std::span<const std::byte>>;
  Section refs;       // wire::kCarriedSection
  Section create;     // wire::kCreateSection
  Section target;     // wire::kTargetSection
  Section arguments;  // wire::kArgumentsSection
  Section order;      // wire::kOrderSection
  [[nodiscard]] bool any() const noexcept { return refs || create || target || arguments || order; }
};

// What they say. A plain value.
struct CarriedSections {
  // From the reserve where there is no other memory: what has been pinned for is to be settled.
  template <class T>
  using List = std::vector<T, base::ReservedAllocator<T>>;
  List<CarriedRef> refs;
  std::optional<CreateRequest> create;
  std::optional<TargetRequest> target;
  List<ReferredArgument> arguments;
  std::optional<PlaceInOrder> place;

  // Throws Error(protocol) if they are malformed, or contradict one another.
  [[nodiscard]] static CarriedSections read(const CarriedBytes& bytes);
};

// The bytes of one section each.
[[nodiscard]] base::Bytes encode(std::span<const CarriedRef> refs);
[[nodiscard]] base::Bytes encode(const CreateRequest& create);
[[nodiscard]] base::Bytes encode(const TargetRequest& target);
[[nodiscard]] base::Bytes encode(std::span<const ReferredArgument> arguments);
[[nodiscard]] base::Bytes encode(const PlaceInOrder& place);
// Changes the number of an encoded place. REQUIRES: `place` is where its first byte is.
void write_number(std::byte* place, std::uint64_t number) noexcept;

// Answers of creations: the numbers of the calls, at most kMaxCreated. Throws Error(protocol) if
// they are malformed.
inline constexpr std::uint32_t kMaxCreated = 4096;
[[nodiscard]] std::vector<std::uint64_t> read_created(std::span<const std::byte> bytes);
void write_created(base::Bytes& out, std::span<const std::uint64_t> calls);

}  // namespace stitch::rref
