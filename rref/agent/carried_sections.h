#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/rref/agent/frame_kinds.h"
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
  [[nodiscard]] bool any() const noexcept { return refs || create || target || arguments; }
};

// What they say. A plain value.
struct CarriedSections {
  std::vector<CarriedRef> refs;
  std::optional<CreateRequest> create;
  std::optional<TargetRequest> target;
  std::vector<ReferredArgument> arguments;

  // Throws Error(protocol) if they are malformed, or contradict one another.
  [[nodiscard]] static CarriedSections read(const CarriedBytes& bytes);
};

// The bytes of one section each.
[[nodiscard]] base::Bytes encode(std::span<const CarriedRef> refs);
[[nodiscard]] base::Bytes encode(const CreateRequest& create);
[[nodiscard]] base::Bytes encode(const TargetRequest& target);
[[nodiscard]] base::Bytes encode(std::span<const ReferredArgument> arguments);

}  // namespace stitch::rref
