#pragma once

#include <type_traits>

namespace stitch::transport::gpu::test {

// Whether a value of one type is passed as one of the other is.
template <typename Own, typename Theirs>
constexpr bool passed_alike() {
  if constexpr (std::is_void_v<Own> || std::is_void_v<Theirs>) {
    return std::is_same_v<Own, Theirs>;
  } else if constexpr (sizeof(Own) != sizeof(Theirs) || alignof(Own) != alignof(Theirs)) {
    return false;
  } else if constexpr (std::is_pointer_v<Own> && std::is_pointer_v<Theirs>) {
    using OwnTarget = std::remove_pointer_t<Own>;
    using TheirTarget = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_const_v<OwnTarget> != std::is_const_v<TheirTarget>) {
      return false;
    } else if constexpr (std::is_scalar_v<OwnTarget> && std::is_scalar_v<TheirTarget>) {
      return passed_alike<std::remove_const_t<OwnTarget>, std::remove_const_t<TheirTarget>>();
    } else {
      return std::is_void_v<OwnTarget> == std::is_void_v<TheirTarget>;
    }
  } else if constexpr (std::is_class_v<Own> || std::is_class_v<Theirs>) {
    return std::is_class_v<Own> && std::is_class_v<Theirs> && std::is_trivially_copyable_v<Own> &&
           std::is_trivially_copyable_v<Theirs>;
  } else {
    constexpr auto integral = [](auto* type) {
      using Type = std::remove_pointer_t<decltype(type)>;
      return std::is_integral_v<Type> || std::is_enum_v<Type>;
    };
    return integral(static_cast<Own*>(nullptr)) && integral(static_cast<Theirs*>(nullptr));
  }
}

template <typename Own, typename Theirs>
constexpr bool called_alike = false;
template <typename Own, typename... OwnArguments, typename Theirs, typename... TheirArguments>
constexpr bool called_alike<Own (*)(OwnArguments...), Theirs (*)(TheirArguments...)> = [] {
  if constexpr (sizeof...(OwnArguments) != sizeof...(TheirArguments)) {
    return false;
  } else {
    return passed_alike<Own, Theirs>() && (passed_alike<OwnArguments, TheirArguments>() && ...);
  }
}();

}  // namespace stitch::transport::gpu::test
