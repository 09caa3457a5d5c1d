#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// The common parts of the formats of files. Internal. Thread contract: any thread.
namespace stitch::files {

using Tensors = std::map<std::string, at::Tensor>;

// The bytes of a file, and what keeps them in memory.
struct FileBytes {
  std::span<std::byte> bytes;
  std::shared_ptr<void> owner;
};
// Takes the next bytes of a file.
using Sink = std::function<void(const void* data, std::size_t size)>;

// A tensor as the header of a file has it.
struct TensorInfo {
  std::string name;
  at::ScalarType type = at::ScalarType::Undefined;
  std::vector<std::int64_t> sizes;
};
// The beginning of a safetensors file. The elements of these tensors follow it in this order,
// without gaps. Throws Error(invalid_argument) for what that format does not have.
[[nodiscard]] std::string safetensors_header(const std::vector<TensorInfo>& tensors);

// The formats. Errors are Error(invalid_argument) with the reason alone, "tensor "a" ...". REQUIRES
// for writing: expect_writable().
[[nodiscard]] Tensors read_safetensors(const FileBytes& file);
void write_safetensors(const Tensors& tensors, const Sink& out);
[[nodiscard]] Tensors read_pt(const FileBytes& file);
void write_pt(const Tensors& tensors, const Sink& out);

// Throws Error(invalid_argument).
[[noreturn]] void refuse(const std::string& why);
// "tensor "name"", for errors.
[[nodiscard]] std::string tensor_text(std::string_view name);

// The names of a type of elements. A version of libtorch may lack it.
struct ElementType {
  const char* torch;        // in C++; with "Storage" behind it, of a storage in Python
  const char* safetensors;  // null when that has none
  const char* python;       // null when a storage in Python says the type
  at::ScalarType type = at::ScalarType::Undefined;
};
// Null when no type is called so, or this libtorch does not have it.
[[nodiscard]] const ElementType* find_type(const char* ElementType::*field, std::string_view name);
// Of a type that is in a file.
[[nodiscard]] const ElementType& element_type(at::ScalarType type);

// Throws, naming the tensor, when no format has it or its name.
void expect_writable(const Tensors& tensors);
// The values of a tensor on the CPU in row-major order; the tensor itself when it has them so.
[[nodiscard]] at::Tensor plain(const at::Tensor& tensor);

// How many elements there are; nullopt when their number overflows, also where a size is 0, or
// there are more than 64 dimensions.
[[nodiscard]] std::optional<std::uint64_t> count_elements(at::IntArrayRef sizes);
// Elements from the first to behind the last one; nullopt as count_elements().
[[nodiscard]] std::optional<std::uint64_t> span_elements(at::IntArrayRef sizes,
                                                         at::IntArrayRef strides);

// These bytes of a file; a copy where the file does not align them. REQUIRES: the file has them.
[[nodiscard]] at::Storage storage_of(const FileBytes& file, std::span<std::byte> bytes,
                                     std::size_t alignment);
// A view of a storage. REQUIRES: all of its elements are in there.
[[nodiscard]] at::Tensor view_of(const at::Storage& storage, at::ScalarType type,
                                 std::int64_t offset, at::IntArrayRef sizes,
                                 at::IntArrayRef strides);
// Throws when a byte is neither 0 nor 1: reading it as a bool would be undefined.
void expect_bools(std::span<const std::byte> bytes);

}  // namespace stitch::files
