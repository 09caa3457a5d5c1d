#include "stitch/rref/files/file_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/printable.h"

namespace stitch::files {

void refuse(const std::string& why) {
  constexpr std::size_t kShown = 1000;  // a name of a file may have megabytes
  throw Error(ErrorCode::invalid_argument,
              why.size() <= kShown ? why : why.substr(0, kShown) + "...");
}

std::string tensor_text(std::string_view name) {
  return "tensor \"" + base::printable(std::string(name)) + '"';
}

namespace {

const auto& element_types() {
  static const auto types = [] {
    std::array list{
        ElementType{"Double", "F64", nullptr},
        ElementType{"Float", "F32", nullptr},
        ElementType{"Half", "F16", nullptr},
        ElementType{"BFloat16", "BF16", nullptr},
        ElementType{"ComplexDouble", nullptr, nullptr},
        ElementType{"ComplexFloat", "C64", nullptr},
        ElementType{"Long", "I64", nullptr},
        ElementType{"Int", "I32", nullptr},
        ElementType{"Short", "I16", nullptr},
        ElementType{"Char", "I8", nullptr},
        ElementType{"Byte", "U8", nullptr},
        ElementType{"Bool", "BOOL", nullptr},
        ElementType{"UInt64", "U64", "uint64"},
        ElementType{"UInt32", "U32", "uint32"},
        ElementType{"UInt16", "U16", "uint16"},
        ElementType{"Float8_e5m2", "F8_E5M2", "float8_e5m2"},
        ElementType{"Float8_e4m3fn", "F8_E4M3", "float8_e4m3fn"},
        ElementType{"Float8_e5m2fnuz", "F8_E5M2FNUZ", "float8_e5m2fnuz"},
        ElementType{"Float8_e4m3fnuz", "F8_E4M3FNUZ", "float8_e4m3fnuz"},
        ElementType{"Float8_e8m0fnu", "F8_E8M0", "float8_e8m0fnu"},
    };
    for (auto& each : list) {
      for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
        const auto type = static_cast<at::ScalarType>(i);
        if (std::string_view(c10::toString(type)) == each.torch) each.type = type;
      }
    }
    return list;
  }();
  return types;
}

}  // namespace

const ElementType* find_type(const char* ElementType::*field, std::string_view name) {
  for (const auto& each : element_types()) {
    if (each.type != at::ScalarType::Undefined && each.*field != nullptr && each.*field == name)
      return &each;
  }
  return nullptr;
}

const ElementType& element_type(at::ScalarType type) {
  return *find_type(&ElementType::torch, c10::toString(type));
}

void expect_writable(const Tensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    const std::string text = tensor_text(name);
    try {
      static_cast<void>(nlohmann::json(name).dump());
    } catch (const nlohmann::json::exception&) {
      refuse("the name of " + text + " is not UTF-8");
    }
    if (!tensor.defined()) refuse(text + " is undefined");
    const char* const type = c10::toString(tensor.scalar_type());
    if (find_type(&ElementType::torch, type) == nullptr)
      refuse(text + " has elements of type " + type + ", which no file has");
    if (tensor.layout() != at::kStrided || tensor.is_meta() || tensor.is_nested())
      refuse(text + " is not dense, or has no memory");
    if (tensor._is_zerotensor() || tensor.numel() == 0) continue;
    const auto span = span_elements(tensor.sizes(), tensor.strides());
    const auto offset = static_cast<std::uint64_t>(tensor.storage_offset());
    if (!span || (*span + offset) * tensor.element_size() > tensor.storage().nbytes())
      refuse(text + " has less memory than its elements take");
  }
}

at::Tensor plain(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach();
  if (values._is_zerotensor()) return at::zeros(values.sizes(), values.scalar_type());
  return values.resolve_conj().resolve_neg().cpu().contiguous();
}

std::optional<std::uint64_t> count_elements(at::IntArrayRef sizes) {
  std::int64_t count = 1;
  bool none = false;
  for (const std::int64_t size : sizes) {
    none = none || size == 0;
    if (__builtin_mul_overflow(count, std::max<std::int64_t>(size, 1), &count)) return std::nullopt;
  }
  if (sizes.size() > 64) return std::nullopt;
  return none ? 0 : static_cast<std::uint64_t>(count);
}

std::optional<std::uint64_t> span_elements(at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto count = count_elements(sizes);
  std::int64_t last = 0;
  for (std::size_t i = 0; i < sizes.size() && count.value_or(0) > 0; ++i) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) ||
        __builtin_add_overflow(last, reach, &last))
      return std::nullopt;
  }
  return count.value_or(0) == 0 ? count : static_cast<std::uint64_t>(last) + 1;
}

at::Storage storage_of(const FileBytes& file, std::span<std::byte> bytes, std::size_t alignment) {
  const at::Tensor mapped = at::from_blob(
      bytes.data(), {static_cast<std::int64_t>(bytes.size())}, [owner = file.owner](void*) {},
      at::TensorOptions(at::kByte));
  const bool aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment == 0;
  return (aligned ? mapped : mapped.clone()).storage();
}

at::Tensor view_of(const at::Storage& storage, at::ScalarType type, std::int64_t offset,
                   at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::empty({0}, at::TensorOptions(type)).set_(storage, offset, sizes, strides);
}

void expect_bools(std::span<const std::byte> bytes) {
  const auto wrong =
      std::find_if(bytes.begin(), bytes.end(), [](std::byte each) { return each > std::byte{1}; });
  if (wrong != bytes.end())
    refuse("it has a byte of " + std::to_string(std::to_integer<int>(*wrong)) +
           " for a bool; a bool is 0 or 1");
}

}  // namespace stitch::files
